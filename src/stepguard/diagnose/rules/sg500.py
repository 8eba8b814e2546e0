"""SG505: the run diverges because its steps are too large."""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.diagnose.case import (
    EXPONENTIALS,
    FORMATS,
    NARROW,
    Case,
    base_name,
    met,
    rounds_to_zero,
    words,
)
from stepguard.diagnose.rule import (
    Proof,
    Rule,
    certain,
    describe,
    likely,
    overflow,
    possible,
    spell,
    zero_divisor,
)
from stepguard.diagnose.rules.sg100 import EXTREME_INPUT, EXTREME_OPERAND, outlier_of
from stepguard.diagnose.trends import growth, lr_climb, lr_jump, lr_not_a_number, rising
from stepguard.records import Certainty, Remedy

# --- SG501: every gradient element is finite, their norm is not.


SQUARE_LIMIT = 1.8446744e19
"""The square root of the largest float32."""


def recognise_sg501(case: Case) -> Proof | None:
    if not case.reading.grads_finite or not _norm_infinite(case):
        return None
    limit = f"squares overflow from {SQUARE_LIMIT:.3g} on"
    if case.magnitude:
        limit += f"; the largest gradient element is {case.magnitude:.3g}"
    true_norm = case.evidence.finite_norm
    ran_away = rising(case) or lr_jump(case) is not None
    stored = case.evidence.huge_buffer or case.evidence.huge_parameter
    prove = certain
    if ran_away or stored:
        prove = likely
    return prove(
        "no gradient element is NaN or Inf, but their 2-norm in float32 is infinite",
        limit,
        f"in float64 the norm is {true_norm:.3g}" if true_norm is not None else "",
        _clipped_away(case),
    )


def _norm_infinite(case: Case) -> bool:
    if case.verdict.kind == "infinite_norm":
        return True
    norm = case.reading.grad_norm
    return norm is not None and math.isinf(norm) and case.loss_finite


def _clipped_away(case: Case) -> str:
    # clip_grad_norm_ multiplies by max_norm / norm without looking at the norm
    clip_norm = case.facts.clip_norm
    clip = "clip_grad_norm_"
    if clip_norm:
        clip = f"clip_grad_norm_ to {clip_norm:g}"
    return (
        f"{clip} would multiply every gradient by {clip_norm or 1:g} / inf = 0: a step that "
        f"learns nothing"
    )


SG501 = Rule(
    code="SG501", recognise=recognise_sg501, yields_to=("SG601", "SG602"), shown_by="record"
)


# --- SG502: the optimizer's epsilon is zero in the parameters' dtype.


NORMS = words("linalg_vector_norm norm _foreach_norm linalg_norm")
"""What LARS, SAM and normalised descent divide by."""
DIVIDES = words("addcdiv div reciprocal rsqrt _fused_adam _fused_adamw _fused_adagrad")
BORN_BAD = ("nonfinite_parameter", "nonfinite_optimizer_state")


def recognise_sg502(case: Case) -> Proof | None:
    dtype = case.dtype or _narrow_parameters(case)
    if case.phase == "optimizer" and case.op:
        return _located(case, dtype)
    if case.origin is not None and case.phase != "optimizer":
        return None
    born = case.reading.state_born and case.verdict.kind in BORN_BAD
    if not born or not _underflows(case, dtype):
        return None
    first = f"finite gradients became non-finite weights in the update: {case.verdict.summary}"
    return certain(first, _epsilon(case, dtype))


def _narrow_parameters(case: Case) -> str:
    return next((name for name in case.facts.param_dtypes if name in NARROW), "")


def _underflows(case: Case, dtype: str) -> bool:
    eps = case.facts.eps
    return eps is not None and (eps == 0.0 or rounds_to_zero(eps, dtype))


def _located(case: Case, dtype: str) -> Proof | None:
    if case.op not in DIVIDES:
        return None
    divisor = zero_divisor(case)
    vanished = case.evidence.eps_underflow or _underflows(case, dtype)
    if not vanished and divisor is None:
        return None
    shown = ""
    if divisor is not None:
        shown = f": {describe(divisor)}"
    sentences = (
        f"{case.place} divided by {_what(case)}{shown}; {_form(case)}",
        _epsilon(case, dtype),
    )
    # without an epsilon nothing rounded to 0: SG201 says what was
    no_epsilon = case.facts.eps is None and not case.evidence.eps_underflow
    if no_epsilon and dtype not in NARROW:
        return possible(*sentences)
    return certain(*sentences)


def _what(case: Case) -> str:
    if case.facts.eps is None and base_name(case.evidence.denominator_from) in NORMS:
        return "the norm of a gradient that is 0, with no epsilon beside it"
    return "sqrt(second moment) + eps, which is 0"


def _form(case: Case) -> str:
    # Adam's addcdiv: param += -lr * tensor1 / tensor2, with the first moment as tensor1
    numerator = case.argument("tensor1", 1)
    if numerator is not None and met(numerator) == (0.0, 0.0):
        return "0 / 0 for every element without gradient"
    return "a moment divided by an exact 0"


def _epsilon(case: Case, dtype: str) -> str:
    eps = case.evidence.eps
    if case.facts.eps is not None:
        eps = case.facts.eps
    if eps is None or dtype not in FORMATS:
        return ""
    owner = ""
    if case.facts.optimizer:
        owner = f"{case.facts.optimizer} "
    smallest = f"{FORMATS[dtype].smallest:.3g}"
    return f"{owner}eps={spell(eps)} is 0 in {dtype}, whose smallest positive number is {smallest}"


SG502 = Rule(code="SG502", recognise=recognise_sg502)


# --- SG504: the learning rate jumped.


FINITE_ANOMALIES = ("spike", "drift")
"""Verdicts on a step in which nothing is non-finite yet."""


def recognise_sg504(case: Case) -> Proof | None:
    # a rate of NaN makes every weight NaN, whatever else is true of the step
    group = lr_not_a_number(case)
    if group is not None:
        return certain(f"group {group} runs with lr {case.reading.lr[group]}")
    jump = lr_jump(case)
    if jump is None:
        return None
    sentences = (jump.sentence, *_consequence(case))
    return Proof(certainty=_certainty(case), sentences=sentences)


def _certainty(case: Case) -> Certainty:
    """How well the jump explains what was seen."""
    kind = case.verdict.kind
    if kind in (*FINITE_ANOMALIES, "infinite_norm") or case.evidence.weights_ruined:
        return "certain"
    # loaded state that brings the old rate back is SG802
    if kind == "lr_mismatch" and case.facts.resumed:
        return "likely"
    if kind == "lr_mismatch" or _weights_ran_away(case):
        return "certain"
    return "possible"


def _weights_ran_away(case: Case) -> bool:
    """A wide dtype overflowed, or nothing but the update is known to be bad."""
    # past exp(709) float64 overflows as well, so that no wider dtype is finite
    if overflow(case) or case.op in EXPONENTIALS:
        return not case.short
    return case.phase in ("", "optimizer") and not case.op


def _consequence(case: Case) -> tuple[str, ...]:
    climb = lr_climb(case)
    grown = ""
    if climb is not None and climb.runaway:
        grown = climb.sentence
    update = case.facts.update_ratio
    ratio = ""
    if update is not None:
        ratio = f"the last update changed the weights by {update:.3g} of their norm"
    return grown, case.verdict.summary, ratio


SG504 = Rule(code="SG504", recognise=recognise_sg504, shown_by="record")


# --- SG503: the optimizer's own state is NaN or Inf.


MEMORY = 100.0
"""Steps that a momentum without a decay of its own is taken to remember."""


def recognise_sg503(case: Case) -> Proof | None:
    proof = _not_finite(case) or _without_squares(case)
    outlier = _outlier(case)
    if proof is None:
        return _after_outlier(case, outlier)
    return replace(proof, sentences=(*proof.sentences, outlier))


def _outlier(case: Case) -> str:
    """A committed outlier still weighs in the second moment for some 1 / (1 - beta2) steps."""
    if case.facts.outlier is None:
        return ""
    step, name, times = case.facts.outlier
    slowest = max(case.facts.betas, default=1.0)
    memory = MEMORY
    if slowest < 1.0:
        memory = 1.0 / (1.0 - slowest)
    if not 0 < case.reading.step - step <= memory:
        return ""
    return (
        f"moments poisoned by step {step}: the gradient of `{name}` was {times:.3g} times its "
        f"usual largest"
    )


def _after_outlier(case: Case, outlier: str) -> Proof | None:
    """Finite, and worse since: the outlier is still part of every update."""
    if not outlier or case.verdict.kind not in FINITE_ANOMALIES:
        return None
    why = (
        "an update divides by the root of the second moment, which keeps the outlier while the "
        "first one forgets it"
    )
    return possible(case.verdict.summary, outlier, why)


def _without_squares(case: Case) -> Proof | None:
    """Finite, and yet a state that training cannot lead to."""
    # Adam's second moment is a mean of squares: it is 0 only where no gradient ever came
    lost = case.facts.lost_squares
    if not lost or case.verdict.kind not in FINITE_ANOMALIES:
        return None
    which = "1 element of exp_avg has" if lost == 1 else f"{lost} elements of exp_avg have"
    why = (
        "such an element moves by lr * exp_avg / eps; squares below 6e-08 vanish in a float16 "
        "checkpoint"
    )
    return certain(case.verdict.summary, f"{which} an exp_avg_sq of exactly 0", why)


def _not_finite(case: Case) -> Proof | None:
    which = _bad_slot(case)
    if which is None:
        return None
    operand = describe(case.bad_operand)
    if case.reading.state_born:
        text = f"`{which}` became non-finite in this step's update, from finite gradients"
        # the operation that made it has a cause of its own
        by_operation = case.origin is not None and bool(case.origin.op)
        if by_operation:
            return possible(text, operand)
        return likely(text, operand)
    gradients = "not looked at"
    if case.reading.grads_finite:
        gradients = "finite"
    text = (
        f"`{which}` was non-finite before this step, while the gradients of this step are "
        f"{gradients}"
    )
    return certain(text, _weights(case), operand)


def _bad_slot(case: Case) -> str | None:
    """The name of the bad optimizer slot; None where the origin is elsewhere."""
    if case.tensor.startswith("opt:"):
        return case.tensor
    if case.origin is not None and case.phase not in ("state", "optimizer"):
        return None
    return next((name for name in case.reading.bad_state if name.startswith("opt:")), None)


def _weights(case: Case) -> str:
    params = [name for name in case.reading.bad_state if name.startswith("param:")]
    if not params:
        return "the parameters themselves are finite: they were restored without it"
    return (
        f"it took {len(params)} parameters along, first `{params[0]}`: no committed gradient was "
        f"non-finite"
    )


SG503 = Rule(code="SG503", recognise=recognise_sg503, yields_to=("SG601",))


# --- SG505: the run diverges because its steps are too large.


STILL = 1e-5
"""Of their norm: an update so small moves no loss by itself."""
LARGE_MOVE = 0.05
"""Of its size, in one update: healthy parameters move by a thousandth."""
STANDS_OUT = 10.0
"""Times the move of all weights together."""
EXTREME_NUMBER = 1e6
"""A factor that no loss function means: a temperature annealed to almost 0, or its reciprocal."""
SIGNS = ("repeat_loss", "older_loss", "update_ratio", "moved")
"""Measurements in a verdict that speak for the weights."""


def recognise_sg505(case: Case) -> Proof | None:
    if lr_jump(case) is not None or lr_not_a_number(case) is not None:
        return None
    certainty = _sg505_certainty(case)
    if certainty is None:
        return None
    if case.impure or _number_explains(case) or _stood_still(case) or outlier_of(case):
        certainty = "possible"
    return Proof(
        certainty=certainty, sentences=_sentences(case), remedies=_bound_the_schedule(case)
    )


def _sg505_certainty(case: Case) -> Certainty | None:
    """How well divergence explains what was seen; None where it does not."""
    if case.verdict.kind == "infinite_norm":
        if rising(case):
            return "certain"
        return None
    if case.verdict.kind in FINITE_ANOMALIES or case.evidence.weights_ruined:
        if _shown(case):
            return "certain"
        return "likely"
    # bfloat16 has the range of float32; in float16 an overflow says nothing about the weights
    if overflow(case) and not case.narrow:
        return _overflowed(case)
    if case.phase == "optimizer" and rising(case):
        return "likely"
    return None


def _overflowed(case: Case) -> Certainty | None:
    """float32 does not overflow on ordinary weights and data: one of the two has run away."""
    from_batch = abs(case.evidence.batch_max or 0.0) >= EXTREME_INPUT
    untrained = case.facts.committed == 0
    if from_batch or untrained:
        return None
    if rising(case):
        return "certain"
    extreme = case.magnitude >= EXTREME_OPERAND
    if extreme and not case.confirmed_samples:
        return "likely"
    return None


def _stood_still(case: Case) -> bool:
    """The last update hardly changed the weights, so it is not what made this loss."""
    if case.verdict.kind not in FINITE_ANOMALIES:
        return False
    ratio = (case.verdict.evidence or {}).get("update_ratio", case.facts.update_ratio)
    return isinstance(ratio, int | float) and ratio < STILL


def _shown(case: Case) -> bool:
    """An earlier batch, older weights, the update or the rate was measured and accuses them."""
    said = case.verdict.evidence or {}
    if any(sign in said for sign in SIGNS) or case.reading.repeat_loss is not None:
        return True
    climb = lr_climb(case)
    return climb is not None and climb.runaway


def _number_explains(case: Case) -> bool:
    """A Python number that went in is extreme: it, and not the weights, may have run away."""
    for operand in case.inputs:
        if operand.shape or not operand.value or operand.dtype not in ("float", "int"):
            continue
        size = abs(operand.value)
        if size >= EXTREME_NUMBER or size <= 1 / EXTREME_NUMBER:
            return True
    return False


def _bound_the_schedule(case: Case) -> tuple[Remedy, ...]:
    climb = lr_climb(case)
    if climb is not None and climb.runaway:
        return SG505.text.special
    return ()


def _sentences(case: Case) -> tuple[str, ...]:
    return (
        case.verdict.summary,
        *_growth(case),
        _repeated(case),
        _update(case),
        _moved_most(case),
        _rates(case),
        _impure(case),
        _surfaced(case),
    )


def _growth(case: Case) -> tuple[str, str]:
    losses = case.facts.losses
    norms = case.facts.grad_norms
    loss = ""
    norm = ""
    if growth(losses) > 1:
        loss = (
            f"over the last {len(losses)} steps the loss went from {spell(min(losses))} to "
            f"{spell(losses[-1])}"
        )
    if growth(norms) > 1:
        norm = f"the gradient norm went from {spell(min(norms))} to {spell(norms[-1])}"
    return loss, norm


def _repeated(case: Case) -> str:
    repeat_loss = case.reading.repeat_loss
    if repeat_loss is None or "older_loss" in (case.verdict.evidence or {}):
        return ""
    return f"an earlier batch, evaluated again on the present weights, gives {spell(repeat_loss)}"


def _update(case: Case) -> str:
    ratio = case.facts.update_ratio
    if ratio is None:
        return ""
    return f"the last update changed the weights by {ratio:.3g} of their norm; 0.001 is usual"


def _moved_most(case: Case) -> str:
    """One parameter that ran away, which the norm of all weights hides."""
    found = runaway_parameter(case)
    if found is None:
        return ""
    name, share = found
    return f"`{name}` moved most: by {share:.3g} of its own size"


def runaway_parameter(case: Case) -> tuple[str, float] | None:
    """The parameter that moved far more for its size than the weights did as a whole."""
    most = case.facts.moved_most
    if most is None or most[1] < LARGE_MOVE:
        return None
    usual = case.facts.update_ratio
    if usual is not None and most[1] < STANDS_OUT * usual:
        return None
    return most


def _rates(case: Case) -> str:
    climb = lr_climb(case)
    if climb is not None:
        return climb.sentence
    if not case.reading.lr:
        return ""
    return f"lr is {', '.join(map(spell, case.reading.lr))} and did not jump"


def _impure(case: Case) -> str:
    if not case.impure:
        return ""
    moved = ", ".join(case.evidence.moves) or "its losses differ"
    return f"but the loss function changes by itself ({moved})"


def _surfaced(case: Case) -> str:
    if not overflow(case):
        return ""
    return (
        f"{case.place} overflowed on operands up to {case.magnitude:.3g}, which no sample explains"
    )


SG505 = Rule(code="SG505", recognise=recognise_sg505, shown_by="inference")


# --- SG506: the loss scale fell below 1 and still the gradients overflow.


def recognise_sg506(case: Case) -> Proof | None:
    scale = case.reading.scale
    # a GradScaler halves its scale at every overflow and never stops by itself
    collapsed = case.verdict.kind == "scaler_collapse"
    if not collapsed and (scale is None or scale >= 1.0 or case.reading.grads_finite):
        return None
    prove = possible
    if collapsed and not case.operated:
        prove = certain
    return prove(
        f"the loss scale is {spell(scale)}, below 1, and the gradients are still not finite",
        "the scale is therefore not what makes them overflow: every step is skipped and the "
        "weights never move",
    )


SG506 = Rule(code="SG506", recognise=recognise_sg506, shown_by="record")

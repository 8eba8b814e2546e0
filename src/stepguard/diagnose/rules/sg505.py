"""SG505: the run diverges because its steps are too large."""

from __future__ import annotations

from stepguard.diagnose.arithmetic import overflow
from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule
from stepguard.diagnose.rules.sg103 import EXTREME_INPUT, EXTREME_OPERAND, outlier_of
from stepguard.diagnose.rules.sg504 import FINITE_ANOMALIES
from stepguard.diagnose.trends import growth, lr_climb, lr_jump, lr_not_a_number, rising
from stepguard.diagnose.wording import spell
from stepguard.records import Certainty, Remedy

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


def recognise(case: Case) -> Proof | None:
    if lr_jump(case) is not None or lr_not_a_number(case) is not None:
        return None
    certainty = _certainty(case)
    if certainty is None:
        return None
    if case.impure or _number_explains(case) or _stood_still(case) or outlier_of(case):
        certainty = "possible"
    return Proof(
        certainty=certainty, sentences=_sentences(case), remedies=_bound_the_schedule(case)
    )


def _certainty(case: Case) -> Certainty | None:
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
        return RULE.text.special
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


RULE = Rule(code="SG505", recognise=recognise, shown_by="inference")

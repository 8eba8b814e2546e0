"""SG501 to SG506: the optimizer, its state, its rates and the loss scale."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from stepguard.diagnose.case import (
    EXPONENTIALS,
    FORMATS,
    NARROW,
    Case,
    base_name,
    met,
    plain,
    rounds_to_zero,
    words,
)
from stepguard.diagnose.rule import (
    Found,
    Proof,
    certain,
    likely,
    overflow,
    possible,
    rule,
    zero_divisor,
)
from stepguard.diagnose.rules.sg100 import EXTREME_INPUT, EXTREME_OPERAND, outlier_of
from stepguard.records import Certainty

# --- What the recent steps show: did the learning rate jump, was the loss already rising?


ABOVE_CONFIGURED = 2.0
CLIMB = 2.0
"""Times above the first rate, or the declared one, at which the schedule is mentioned."""
RISING = 10.0
"""Times the loss grew over the remembered steps."""


class Rise(NamedTuple):
    """A learning rate that is not what it was: by a jump, or step by step since the run began."""

    group: int
    before: float
    """The rate before the jump, the configured one, or that of the first step."""
    now: float
    steps: int | None = None
    """Steps since; None where it is measured against the configuration, or not known."""
    declared: float | None = None
    """What the schedule calls its highest rate; None without a schedule."""

    @property
    def times(self) -> float:
        return self.now / self.before

    @property
    def runaway(self) -> bool:
        """Above everything that was declared: a warm-up without an end."""
        return bool(self.declared) and self.now > CLIMB * (self.declared or 0.0)

    @property
    def above_declared(self) -> float | None:
        if self.declared:
            return self.now / self.declared
        return None

    @property
    def when(self) -> str:
        """When a jump was, seen from the bad step."""
        if not self.steps:
            return "" if self.steps is None else "in this very step"
        return f"{self.steps} step{'s' if self.steps > 1 else ''} before the bad one"


def lr_climb(case: Case) -> Rise | None:
    """The group whose rate has grown most since the first step; None when none has grown much."""
    facts = case.facts
    begun = facts.first_lr
    if not begun and facts.lr_history:
        begun = facts.lr_history[0]
    found = []
    for group, (first, now) in enumerate(zip(begun, case.reading.lr, strict=False)):
        declared = facts.initial_lr[group] if group < len(facts.initial_lr) else None
        climb = Rise(group, first, now, facts.committed or None, declared or None)
        if climb.runaway or now > CLIMB * first > 0:
            found.append(climb)
    return max(found, key=lambda climb: (climb.runaway, climb.now), default=None)


def lr_jump(case: Case) -> Rise | None:
    """The largest unexplained rise of a learning rate; None when all followed their schedule."""
    history = case.facts.lr_history
    jumps = []
    for group in range(min(map(len, history), default=0)):
        rates = [row[group] for row in history]
        for position in range(1, len(rates)):
            now, before, top = rates[position], rates[position - 1], max(rates[:position])
            # a group that stood still so far is measured by the others
            if top == 0:
                before = top = max(map(max, history[:position]))
            # times above every rate seen before: a linear warm-up, which doubles at first, does not
            # jump
            # times above the rate of the step before: a schedule that was thrown back
            if before > 0 and (now > 2.5 * top or now > 5.0 * before):
                jumps.append(Rise(group, before, now, len(rates) - 1 - position))
    jumps.extend(above_configured(case)[:1])
    # the judge has already compared the rate with its ceiling
    if "ceiling" in case.said:
        rate, ceiling = float(case.said["lr"]), float(case.said["ceiling"])
        if ceiling > 0 and math.isfinite(rate):
            jumps.append(Rise(int(case.said["group"]), ceiling, rate))
    return max(jumps, key=lambda jump: jump.times, default=None)


def above_configured(case: Case, *, climbing: bool = False) -> list[Rise]:
    """Groups whose rate is above the configured one.

    `climbing`: also where a schedule (OneCycle, a linear warm-up) has climbed from its start.
    """
    facts = case.facts
    found = []
    pairs = zip(facts.configured_lr, case.reading.lr, strict=False)
    for group, (allowed, rate) in enumerate(pairs):
        if not 0 < ABOVE_CONFIGURED * allowed < rate:
            continue
        rates = [row[group] for row in facts.lr_history if group < len(row)]
        from_start = facts.committed is None or facts.committed < len(rates)
        climbed = not from_start or rates[:1] <= [ABOVE_CONFIGURED * allowed]
        if climbing or facts.resumed or len(rates) < 2 or not climbed:
            found.append(Rise(group, allowed, rate))
    return found


def lr_not_a_number(case: Case) -> int | None:
    """The group whose learning rate is NaN or infinite."""
    for group, rate in enumerate(case.reading.lr):
        if not math.isfinite(rate):
            return group
    return None


def growth(values: tuple[float, ...]) -> float:
    """How many times larger the last value is than the smallest before it; 1 when unknown."""
    lowest = min(map(abs, values[:-1]), default=0.0)
    return abs(values[-1]) / lowest if lowest > 0 else 1.0


def rising(case: Case) -> bool:
    """Losses or gradient norms had already grown manifold before the step went bad."""
    return growth(case.facts.losses) >= RISING or growth(case.facts.grad_norms) >= RISING


# --- SG501: every gradient element is finite, their norm is not.


@rule(yields_to="SG601 SG602", shown_by="record")
def sg501(case: Case) -> Found:
    reading = case.reading
    infinite = reading.grad_norm is not None and math.isinf(reading.grad_norm) and case.loss_finite
    if not reading.grads_finite or not (infinite or case.verdict.kind == "infinite_norm"):
        return None
    ran_away = rising(case) or lr_jump(case) is not None
    stored = case.evidence.huge_buffer or case.evidence.huge_parameter
    prove = likely if ran_away or stored else certain
    parts = sorted(reading.components.items(), key=lambda item: -abs(item[1]))
    # clip_grad_norm_ multiplies by max_norm / norm without looking at the norm
    return prove(largest=case.magnitude or None, parts=parts)


# --- SG502: the optimizer's epsilon is zero in the parameters' dtype.


NORMS = words("linalg_vector_norm norm _foreach_norm linalg_norm")
"""What LARS, SAM and normalised descent divide by."""
DIVIDES = words("addcdiv div reciprocal rsqrt _fused_adam _fused_adamw _fused_adagrad")
BORN_BAD = ("nonfinite_parameter", "nonfinite_optimizer_state")


@rule()
def sg502(case: Case) -> Found:
    facts, evidence = case.facts, case.evidence
    if case.phase not in ("", "optimizer"):
        return None
    fields = _epsilon(case)
    dtype = fields["dtype"]
    # an epsilon of 0 is one that no dtype can hold
    underflows = facts.eps == 0 or rounds_to_zero(facts.eps or 0.0, dtype)
    if not case.op:
        born = case.reading.state_born and case.verdict.kind in BORN_BAD
        if underflows and born:
            return certain("update", **fields)
        return None
    divisor = zero_divisor(case)
    if case.op not in DIVIDES or not (divisor or underflows or evidence.eps_underflow):
        return None
    # without an epsilon nothing rounded to 0: SG201 says what was
    no_epsilon = facts.eps is None and not evidence.eps_underflow
    prove = possible if no_epsilon and dtype not in NARROW else certain
    return prove("located", divisor=divisor, **fields)


def _epsilon(case: Case) -> dict[str, Any]:
    """What is said of the epsilon, of what it stood beside, and of the parameters."""
    facts = case.facts
    eps = case.evidence.eps if facts.eps is None else facts.eps
    held_in = case.dtype or next(iter(facts.param_dtypes), "")
    dtype = case.dtype or next((name for name in facts.param_dtypes if name in NARROW), "")
    narrow = held_in in NARROW
    stored = case.tensor or next(iter(case.reading.bad_state), "")
    # Adam's addcdiv: param += -lr * tensor1 / tensor2, with the first moment as tensor1
    numerator = case.argument("tensor1")
    return {
        "eps": eps,
        "zero": eps == 0,
        "dtype": dtype,
        "smallest": FORMATS[dtype].smallest if dtype in FORMATS else None,
        "norm": facts.eps is None and base_name(case.evidence.denominator_from) in NORMS,
        "no_gradient": numerator is not None and met(numerator) == (0.0, 0.0),
        "held_in": held_in,
        "rounded": narrow and eps is not None and rounds_to_zero(eps, held_in),
        "enough": "1e-4" if narrow else "1e-8",
        "name": stored.partition(":")[2],
    }


# --- SG503: the optimizer's own state is NaN or Inf.


REBUILT = 10
"""Steps of a momentum of 0.9."""


@rule(yields_to="SG601")
def sg503(case: Case) -> Found:
    facts, reading = case.facts, case.reading
    fields = _moments(case)
    slots = [name for name in (case.tensor, *reading.bad_state) if name.startswith("opt:")]
    located = case.tensor.startswith("opt:") or case.phase in ("", "state", "optimizer")
    if slots and located:
        params = tuple(name for name in reading.bad_state if name.startswith("param:"))
        fields |= {"which": slots[0], "params": params, "count": len(params)}
        if not reading.state_born:
            return certain("before", **fields)
        # the operation that made it has a cause of its own
        prove = possible if case.where.op else likely
        return prove("born", **fields)
    if not case.verdict.finite_anomaly:
        return None
    # Adam's second moment is a mean of squares: it is 0 only where no gradient ever came
    if facts.lost_squares:
        return certain("squares", one=facts.lost_squares == 1, **fields)
    # finite, and worse since: the outlier is still part of every update
    if fields["outlier"]:
        return possible("after an outlier", **fields)
    return None


def _moments(case: Case) -> dict[str, Any]:
    """What is remembered of an outlier, and how the state can be rebuilt."""
    slowest = max(case.facts.betas, default=1.0)
    # steps that a momentum without a decay of its own is taken to remember
    memory, rebuilt = 100.0, REBUILT
    if slowest < 1.0:
        memory = 1.0 / (1.0 - slowest)
        rebuilt = round(memory) if slowest > 0 else REBUILT
    step, name, times = case.facts.outlier or (case.reading.step, "", 0.0)
    # it still weighs in the second moment for some 1 / (1 - beta2) steps
    remembered = 0 < case.reading.step - step <= memory
    return {
        "outlier": (step, name, times) if remembered else (),
        "parameter": case.evidence.parameter or name,
        "slot": case.tensor.partition(":")[2],
        "lost": case.facts.lost_squares or None,
        "rebuilt": rebuilt,
    }


# --- SG504: the learning rate jumped.


@rule(shown_by="record")
def sg504(case: Case) -> Found:
    facts = case.facts
    # a rate of NaN makes every weight NaN, whatever else is true of the step
    group = lr_not_a_number(case)
    if group is not None:
        before = [rates[group] for rates in facts.lr_history[:-1] if group < len(rates)]
        last = before[-1] if before else None
        return certain("bad rate", group=group, rate=case.reading.lr[group], before=last)
    jump = lr_jump(case)
    if jump is None:
        return None
    climb = lr_climb(case)
    fields = {"jump": jump, "climb": climb if climb and climb.runaway else None}
    return Proof(_how_well_a_jump(case), "jump", fields)


def _how_well_a_jump(case: Case) -> Certainty:
    """How well a jump of the learning rate explains what was seen."""
    kind = case.verdict.kind
    ruined = case.verdict.finite_anomaly or case.evidence.weights_ruined
    # loaded state that brings the old rate back is SG802
    if kind == "lr_mismatch" and not ruined:
        return "likely" if case.facts.resumed else "certain"
    # past exp(709) float64 overflows as well, so that no wider dtype is finite; without an
    # operation nothing but the update is known to be bad
    if overflow(case) or case.op in EXPONENTIALS:
        ran_away = not case.short
    else:
        ran_away = case.phase in ("", "optimizer") and not case.op
    return "certain" if ruined or ran_away or kind == "infinite_norm" else "possible"


# --- SG505: the run diverges because its steps are too large.


EXTREME_NUMBER = 1e6
"""A factor that no loss function means: a temperature annealed to almost 0, or its reciprocal."""
SIGNS = ("repeat_loss", "older_loss", "update_ratio", "moved")
"""Measurements in a verdict that speak for the weights."""


@rule(shown_by="inference")
def sg505(case: Case) -> Found:
    if lr_jump(case) is not None or lr_not_a_number(case) is not None:
        return None
    certainty = _how_well(case)
    if certainty is None:
        return None
    facts, reading, said = case.facts, case.reading, case.said
    ratio = said.get("update_ratio", facts.update_ratio)
    # the last update hardly changed the weights, so it is not what made this loss
    # update norm as a share of the weights' norm; one this small cannot move the loss
    still = case.verdict.finite_anomaly and isinstance(ratio, int | float) and ratio < 1e-5
    if case.impure or _number_explains(case) or still or outlier_of(case):
        certainty = "possible"
    # with SGD the norm of the gradient bounds the step; Adam's step does not depend on it
    sgd = facts.optimizer == "SGD" and facts.clip_norm is None
    # one parameter that ran away, which the norm of all weights hides
    moved = facts.moved_most or ("", 0.0)
    # move of one parameter in one update, as a share of its size; 0.001 is healthy
    # times the move of all weights together
    stands_out = moved[1] >= max(0.05, 10.0 * (facts.update_ratio or 0.0))
    fields = {
        "losses": _ends(facts.losses),
        "norms": _ends(facts.grad_norms),
        "count": len(facts.losses),
        "repeat_loss": None if "older_loss" in said else reading.repeat_loss,
        "moved": moved if stands_out else (),
        "climb": lr_climb(case),
        "sgd": sgd,
        "overflowed": overflow(case),
    }
    return Proof(certainty, "", fields)


def _ends(values: tuple[float, ...]) -> tuple[float, ...]:
    """The smallest and the last of values that have grown; else none."""
    return (min(values), values[-1]) if growth(values) > 1 else ()


def _how_well(case: Case) -> Certainty | None:
    """How well divergence explains what was seen; None where it does not."""
    has_risen = rising(case)
    if case.verdict.kind == "infinite_norm":
        if has_risen:
            return "certain"
        return None
    if case.verdict.finite_anomaly or case.evidence.weights_ruined:
        # an earlier batch, older weights, the update or the rate was measured and accuses them
        measured = any(sign in case.said for sign in SIGNS) or case.reading.repeat_loss is not None
        climb = lr_climb(case)
        shown = measured or (climb is not None and climb.runaway)
        return "certain" if shown else "likely"
    # bfloat16 has the range of float32; in float16 an overflow says nothing about the weights
    if overflow(case) and not case.narrow:
        return _overflowed(case, has_risen)
    if case.in_update and has_risen:
        return "likely"
    return None


def _overflowed(case: Case, has_risen: bool) -> Certainty | None:
    """float32 does not overflow on ordinary weights and data: one of the two has run away."""
    from_batch = abs(case.evidence.batch_max or 0.0) >= EXTREME_INPUT
    if from_batch or case.facts.committed == 0:
        return None
    if has_risen:
        return "certain"
    extreme = case.magnitude >= EXTREME_OPERAND and not case.confirmed_samples
    if extreme:
        return "likely"
    return None


def _number_explains(case: Case) -> bool:
    """A Python number that went in is extreme: it, and not the weights, may have run away."""
    for operand in case.inputs:
        if operand.shape or not operand.value or operand.dtype not in ("float", "int"):
            continue
        size = abs(operand.value)
        if size >= EXTREME_NUMBER or size <= 1 / EXTREME_NUMBER:
            return True
    return False


# --- SG506: the loss scale fell below 1 and still the gradients overflow.


@rule(shown_by="record")
def sg506(case: Case) -> Found:
    scale = case.reading.scale
    # a GradScaler halves its scale at every overflow and never stops by itself
    collapsed = case.verdict.kind == "scaler_collapse"
    if not collapsed and (scale is None or scale >= 1.0 or case.reading.grads_finite):
        return None
    prove = certain if collapsed and not case.operated else possible
    return prove(float16=plain(case.evidence.autocast or "") == "float16")

"""SG503: the optimizer's own state is NaN or Inf."""

from __future__ import annotations

from dataclasses import replace

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.diagnose.rules.sg504 import FINITE_ANOMALIES
from stepguard.diagnose.wording import describe

MEMORY = 100.0
"""Steps that a momentum without a decay of its own is taken to remember."""


def recognise(case: Case) -> Proof | None:
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


RULE = Rule(code="SG503", recognise=recognise, yields_to=("SG601",))

"""SG602: a buffer is NaN or Inf, or finite garbage that overflows what is computed with it."""

from __future__ import annotations

from stepguard.diagnose.case import Case, reach
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible
from stepguard.diagnose.wording import counts, describe, spell


def recognise(case: Case) -> Proof | None:
    return _kept_outside(case) or _garbage(case) or _buffer(case)


def _garbage(case: Case) -> Proof | None:
    """Finite values that no buffer holds on purpose, as memory that nobody filled does."""
    which = case.evidence.huge_buffer
    if which is None:
        return None
    stored = next((operand for operand in case.inputs if operand.name == which), None)
    reaches = "" if stored is None else f", up to {spell(reach(stored))}"
    what = "what overflowed was multiplied by it"
    if case.reading.grads_finite and case.loss_finite:
        what = "the gradients are as large as it makes them, and their norm overflows"
    return likely(
        f"`{which}` is finite but absurdly large{reaches}: {what}",
        describe(stored, which) if stored is not None else f"{case.place} overflowed",
        "memory that torch.empty left unwritten looks like this; no gradient ever repairs a buffer",
    )


def _kept_outside(case: Case) -> Proof | None:
    """A tensor that a module keeps as a plain attribute: it is neither saved nor restored."""
    attribute = case.evidence.attribute
    if attribute is None or case.evidence.constant is None:
        return None
    owner, _, name = attribute.rpartition(".")
    which = "the model"
    if owner:
        which = f"module `{owner}`"
    bad = next((operand for operand in case.inputs if not operand.finite), None)
    return certain(
        f"`self.{name}` of {which} was already non-finite when {case.place} read it",
        describe(bad, f"self.{name}"),
        f"it is a tensor kept by {which} outside its buffers: no checkpoint holds it and no "
        f"gradient repairs it",
    )


def _buffer(case: Case) -> Proof | None:
    which = _bad_buffer(case)
    if which is None:
        return None
    running = "running_" in which
    bad = case.bad_operand
    amount = ""
    if bad is not None:
        amount = f"it holds {counts(bad)}: {describe(bad, which)}"
    hidden = ""
    if running and case.loss_finite:
        hidden = (
            "training does not read running statistics, so its loss looks healthy; evaluation "
            "will be NaN"
        )
    # what the model itself writes into a buffer has a cause of its own; torch writes statistics
    by_operation = case.origin is not None and bool(case.origin.op)
    made_here = case.reading.state_born and by_operation and not running
    prove = certain
    if made_here:
        prove = possible
    return prove(f"`{which}` is non-finite; no gradient ever repairs a buffer", amount, hidden)


def _bad_buffer(case: Case) -> str | None:
    """The name of the bad buffer; None where the origin is something else."""
    # the origin names another tensor: then the buffer is a consequence
    if case.tensor:
        if case.tensor.startswith("buffer:"):
            return case.tensor
        return None
    if case.origin is not None and case.phase != "state":
        return None
    return next((name for name in case.reading.bad_state if name.startswith("buffer:")), None)


RULE = Rule(code="SG602", recognise=recognise)

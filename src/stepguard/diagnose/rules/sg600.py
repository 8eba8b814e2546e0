"""SG602: a buffer is NaN or Inf, or finite garbage that overflows what is computed with it."""

from __future__ import annotations

from stepguard.diagnose.case import Case, reach
from stepguard.diagnose.rule import (
    Proof,
    Rule,
    at_index,
    certain,
    counts,
    describe,
    likely,
    possible,
    spell,
)

# --- SG601: a parameter was bad before the step.


def recognise_sg601(case: Case) -> Proof | None:
    return _uninitialised(case) or _huge(case) or _not_finite(case)


def _uninitialised(case: Case) -> Proof | None:
    if not case.evidence.uninitialised:
        return None
    # the memory itself was seen; which parameter or table should have filled it was not
    text = f"{case.place} read memory that torch.empty left uninitialised"
    return likely(text, _amount(case))


def _huge(case: Case) -> Proof | None:
    which = case.evidence.huge_parameter
    if which is None or case.facts.committed != 0:
        return None
    text = f"`{which}` is finite but absurdly large before the first update"
    more = (
        f"what {case.place} made of it overflowed; no initialisation gives such values, memory "
        f"that nobody filled does"
    )
    return certain(text, more)


def _not_finite(case: Case) -> Proof | None:
    which = _bad_parameter(case)
    if which is None:
        return None
    early = case.facts.committed == 0 or case.reading.step == 0
    when = "before this step"
    if early:
        when = "before the first step: it was never initialised, or loaded that way"
    stored = [name for name in case.reading.bad_state if name.startswith("param:")]
    more = ""
    if len(stored) > 1:
        more = f"{len(stored)} parameters are non-finite in all"
    # bad optimizer state makes bad parameters with the next update: then SG503 knows more
    by_optimizer = not early and any(name.startswith("opt:") for name in case.reading.bad_state)
    prove = certain
    if by_optimizer:
        prove = likely
    return prove(f"`{which}` was non-finite {when}", _amount(case), more)


def _bad_parameter(case: Case) -> str | None:
    """The name of the bad parameter; None where the origin is something else."""
    if case.reading.state_born:
        return None
    if case.origin is not None and case.phase != "state":
        return None
    if case.tensor:
        if case.tensor.startswith("param:"):
            return case.tensor
        return None
    return next((name for name in case.reading.bad_state if name.startswith("param:")), None)


def _amount(case: Case) -> str:
    bad = case.bad_operand
    if bad is None:
        return ""
    amount = f"it holds {counts(bad)}"
    if bad.index is None:
        return amount
    return f"{amount}, the first{at_index(bad)}"


SG601 = Rule(code="SG601", recognise=recognise_sg601)


# --- SG602: a buffer is NaN or Inf, or finite garbage that overflows what is computed with it.


def recognise_sg602(case: Case) -> Proof | None:
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


SG602 = Rule(code="SG602", recognise=recognise_sg602)


# --- SG603: a checkpoint that must not be used.


def recognise_sg603(case: Case) -> Proof | None:
    if case.phase != "checkpoint":
        return _brought_in(case)
    which = "the checkpoint is not usable"
    if case.tensor:
        which = f"`{case.tensor}` in the checkpoint is not usable"
    return certain(which, describe(case.bad_operand), case.verdict.summary)


def _brought_in(case: Case) -> Proof | None:
    """State that was loaded in this process and is bad before its first step."""
    nothing_done = case.facts.just_loaded or case.facts.committed == 0
    fresh = case.facts.resumed and nothing_done
    if not fresh or case.phase != "state" or not case.tensor or case.reading.state_born:
        return None
    text = (
        f"`{case.tensor}` is non-finite before the first step of a run whose state was loaded "
        f"from a checkpoint"
    )
    return likely(text, "no step of this process has changed it")


SG603 = Rule(code="SG603", recognise=recognise_sg603, shown_by="record")

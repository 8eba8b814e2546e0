"""SG601 to SG603: stored state that was bad before the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, certain, likely, possible, rule


@rule()
def sg601(case: Case) -> Proof | None:
    """A parameter was bad before the step."""
    evidence = case.evidence
    first_step = case.facts.committed == 0 or case.reading.step == 0
    bad = case.bad_operand
    huge = evidence.huge_parameter is not None
    stored = evidence.huge_parameter or case.tensor or case.stored("param:")
    fields = {
        "name": stored.partition(":")[2],
        "first_step": first_step,
        "step_before": case.reading.step - 1,
        # some elements are fine: it was filled, and then damaged or loaded that way
        "partly": bad is not None and bad.min is not None and not huge,
    }
    if evidence.uninitialised:
        # the memory itself was seen; which parameter or table should have filled it was not
        return likely("uninitialised", **fields)
    if huge and case.facts.committed == 0:
        return certain("huge", **fields)
    which = case.stored("param:")
    before = not case.reading.state_born and case.phase in ("", "state")
    if which and before:
        return _bad_parameter(case, which, fields)
    return None


def _bad_parameter(case: Case, which: str, fields: dict[str, Any]) -> Proof:
    count = sum(name.startswith("param:") for name in case.reading.bad_state)
    # bad optimizer state makes bad parameters with the next update: then SG503 knows more
    by_optimizer = any(name.startswith("opt:") for name in case.reading.bad_state)
    prove = likely if by_optimizer and not fields["first_step"] else certain
    return prove("not finite", which=which, several=count > 1, count=count, **fields)


@rule()
def sg602(case: Case) -> Proof | None:
    """A buffer is NaN or Inf, or finite garbage that overflows what is computed with it."""
    evidence = case.evidence
    if evidence.attribute is not None and evidence.constant is not None:
        # a tensor that a module keeps as a plain attribute: it is neither saved nor restored
        owner, _, name = evidence.attribute.rpartition(".")
        label = f"self.{name}"
        shown = [replace(operand, label=label) for operand in case.inputs if not operand.finite]
        return certain("attribute", owner=owner, name=name, shown=shown)
    return _bad_buffer(case)


def _bad_buffer(case: Case) -> Proof | None:
    evidence = case.evidence
    which = case.stored("buffer:")
    path = (case.tensor or which).partition(":")[2]
    module, _, name = path.rpartition(".")
    fields = {"path": path, "module": module, "running": name.startswith("running_")}
    if evidence.huge_buffer is not None:
        # finite values that no buffer holds on purpose, as memory that nobody filled does
        known = tuple(one for one in case.inputs if one.name == evidence.huge_buffer)
        in_norm = case.reading.grads_finite and case.loss_finite
        return likely("huge", known=known, in_norm=in_norm, **fields)
    if not which or (not case.tensor and case.phase not in ("", "state")):
        return None
    # what the model itself writes into a buffer has a cause of its own; torch writes statistics
    statistics = "running_" in which
    made_here = case.reading.state_born and case.where.op and not statistics
    hidden = statistics and case.loss_finite
    bad = case.bad_operand
    named = None if bad is None else replace(bad, label=which)
    prove = possible if made_here else certain
    return prove("not finite", which=which, hidden=hidden, named=named, **fields)


@rule(shown_by="record")
def sg603(case: Case) -> Proof | None:
    """A checkpoint that must not be used."""
    if case.phase == "checkpoint":
        return certain("checkpoint")
    # state that was loaded in this process and is bad before its first step
    fresh = case.facts.resumed and (case.facts.just_loaded or case.facts.committed == 0)
    if not fresh or case.phase != "state" or not case.tensor or case.reading.state_born:
        return None
    return likely("loaded")

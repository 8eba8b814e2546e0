"""SG603: a checkpoint that must not be used."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.wording import describe


def recognise(case: Case) -> Proof | None:
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


RULE = Rule(code="SG603", recognise=recognise, shown_by="record")

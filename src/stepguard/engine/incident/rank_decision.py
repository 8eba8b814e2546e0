"""One decision on every rank, whatever fails on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from stepguard.engine.context import Context
from stepguard.engine.protect import explain_or_warn, in_words
from stepguard.records import Decision, Incident, Reading
from stepguard.records.codec import to_jsonable
from stepguard.sentinel.rank_agreement import RankFault

T = TypeVar("T")

UNDECIDED = "stepguard could not decide by a fault of its own"
DISARMED = (
    "the state itself is damaged, and a fault of stepguard's own keeps it from being repaired"
)


def with_decision(
    context: Context,
    incident: Incident,
    choose: Callable[[], Decision],
    tell: Callable[[str], None],
) -> Incident:
    """Add what all ranks have chosen alike; where one could not choose, all skip the step."""
    before = context.budget
    decision = explain_or_warn(None, tell, tried, context, choose)
    if context.agreement.size == 1 or context.agreement.apart:
        return replace(incident, decision=decision or _undecided(context, incident))

    def own() -> dict[str, Any]:
        return {"chosen": decision and to_jsonable(decision), "id": incident.id}

    told = context.agreement.together(own, "the decision", whatever_failed=True)
    # a number is added where a folder of that name is there already: the same one on all ranks
    name = max((facts["id"] for facts in told), key=lambda one: (len(one), one))
    incident = replace(incident, id=name)
    chosen = [facts["chosen"] for facts in told]
    if decision is None or any(other != chosen[0] for other in chosen):
        context.budget = before
        decision = _undecided(context, incident)
    return replace(incident, decision=decision)


def tried(context: Context, look: Callable[[], T]) -> T:
    """Call what exchanges something with other ranks; a fault here keeps none of them waiting."""
    try:
        return look()
    except RankFault:
        # all ranks have it
        raise
    except Exception as fault:
        context.agreement.give_up(in_words(fault))
        raise


def _undecided(context: Context, incident: Incident) -> Decision:
    """Skip the step within the budget of lost steps; stop where that leaves damaged weights."""
    policy = context.config.policy
    context.budget = context.budget.spend(incident.step).lose(1.0, policy)
    why = context.budget.exceeded(policy)
    if damaged(incident.reading):
        why = why or "the state itself is damaged"
    return Decision(
        action="stop" if why else "skip",
        reason=f"{UNDECIDED}; {why}" if why else UNDECIDED,
        consecutive=context.budget.consecutive,
        total=context.budget.total,
    )


def last_resort(incident: Incident) -> Incident:
    """Nothing could be decided and the guard is disarmed: never train on with damaged weights."""
    if incident.decision is not None or not damaged(incident.reading):
        return incident
    return replace(incident, decision=Decision(action="stop", reason=DISARMED))


def damaged(reading: Reading) -> bool:
    """Is what the run holds bad, so that leaving a step out does not help?"""
    return bool(reading.missed) or (bool(reading.bad_state) and not reading.state_born)

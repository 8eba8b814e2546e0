"""Say what was decided about a bad step, and what was really done about it."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import scale_rates
from stepguard.records import Decision, Incident, Verdict
from stepguard.records.decision import Action


def not_applied(incident: Incident) -> Incident:
    """The incident where a fault of the guard's own kept the decision from being applied.

    The step is dropped all the same. Damaged weights that were to be rewound are still there, so
    the run stops.
    """
    decision = incident.decision
    if decision is None:
        return incident
    action = _instead_of(decision.action)
    if action == decision.action:
        return incident
    why = f"{decision.action} failed by a fault of stepguard's own"
    return replace(incident, decision=replace(decision, action=action, reason=why))


def _instead_of(action: Action) -> Action:
    """What remains of an action that failed; the same one where there was nothing to do."""
    match action:
        case "skip" | "stop" | "leave_out" | "note":
            return action
        case "heal" | "rewind":
            return "stop"
        case "retry" | "undo" | "lower_lr":
            return "skip"
        case unknown:
            assert_never(unknown)


def change_settings(context: Context, decision: Decision) -> None:
    """Go on with the rate, epsilon or clipping that was decided on."""
    groups = context.optimizer.param_groups
    if decision.lr_factor is not None:
        factors = [decision.lr_factor] * len(groups)
        scale_rates(context.optimizer, context.scheduler, factors)
    if decision.new_eps is not None:
        for group in groups:
            if "eps" in group:
                group["eps"] = decision.new_eps
    if decision.new_clip is not None:
        context.config = replace(context.config, clip_norm=decision.new_clip)


def let_through(verdict: Verdict, incident: Incident | None) -> bool:
    """A finite step that is only told, or that nothing could be decided on, is committed."""
    if not verdict.finite_anomaly:
        return False
    return incident is None or incident.decision is None or incident.decision.action == "note"


def rewinds(incident: Incident | None) -> bool:
    """Was the step answered by a rewind, which takes back its update as well?"""
    if incident is None or incident.decision is None:
        return False
    return incident.decision.action == "rewind"


def leaves_out(incident: Incident | None) -> bool:
    """Is the step to go on without what is proven guilty?"""
    if incident is None or incident.decision is None:
        return False
    return incident.decision.action == "leave_out"


def with_left_out(incident: Incident, what: str) -> Incident:
    """Say in the decision what was really left out."""
    assert incident.decision is not None
    return replace(incident, decision=replace(incident.decision, left_out=what))


def skipped_after_all(incident: Incident | None) -> Incident | None:
    """Say that the whole step was dropped, because nothing could be cut out of it."""
    if incident is None or incident.decision is None or not leaves_out(incident):
        return incident
    return replace(
        incident, decision=replace(incident.decision, action="skip", left_out="the step")
    )

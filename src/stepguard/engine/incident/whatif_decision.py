"""`Policy(on_incident="whatif")`: try what helps before deciding, and do the cheapest that works.

Every candidate but the one that leaves samples out also leaves out the bad step, so none is worse
than skipping. Where nothing works, what the policy had decided stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from stepguard.engine.context import Context
from stepguard.engine.incident.lead_up import as_window
from stepguard.engine.recover.snapshots import Snapshots
from stepguard.records import Action, Decision, Incident
from stepguard.records.whatif import TrialOutcome, WhatIf
from stepguard.report.phrases import count
from stepguard.state.steps_before import Window
from stepguard.whatif.candidates import Candidate
from stepguard.whatif.comparison import compare_candidates
from stepguard.whatif.ranking import no_worse
from stepguard.whatif.subject import LeadUp, TrialSubject
from stepguard.whatif.undone import copied_state

MOST_TRIED = 20
"""Incidents of a run that are tried: one that fails all the time must not spend its time on it."""
DROPS_THE_STEP = ("skip", "undo", "lower_lr", "leave_out")
APPLICABLE = ("leave out", "skip", "eps", "clip", "lr x0.5", "lr x0.1")
"""What a guard can do by itself, and take back by a rewind."""
RATES = {"lr x0.5": 0.5, "lr x0.1": 0.1}


def what_helps(
    context: Context, snapshots: Snapshots, incident: Incident, decision: Decision
) -> Decision:
    """The decision after trials: the same, or one that was seen to work. The journal says why."""
    lead_up = context.lead_up
    if lead_up is None or lead_up.incident != incident.id or len(context.incidents) >= MOST_TRIED:
        return decision
    if decision.action in DROPS_THE_STEP:
        return _instead_of_skipping(context, snapshots, incident, decision, lead_up)
    if decision.action == "rewind":
        return _rewind_lower(context, snapshots, incident, decision, lead_up)
    return decision


def _instead_of_skipping(
    context: Context,
    snapshots: Snapshots,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """From the present weights: what keeps the bad value away in the steps that follow?"""
    # a batch that failed just before is what may come next
    others = [*lead_up.earlier, *lead_up.steps, *lead_up.failed_before]
    if not others:
        return decision
    window = Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    norms = context.history.norms
    found = compare_candidates(
        _subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name in APPLICABLE,
        adapt=_without_the_step,
        usual_norm=statistics.median(norms) if norms else None,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None:
        return decision
    return _as_decision(decision, best, _why(found, best))


def _without_the_step(candidate: Candidate) -> Candidate:
    """What is changed for the steps that follow; the bad one is dropped in any case."""
    if candidate.rows or candidate.micro_batches:
        return candidate
    return replace(candidate, skip=True)


def _cheapest(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    """The cheapest one that works and ends no higher than skipping does."""
    working = sorted((one for one in outcomes if one.works), key=lambda one: one.cost)
    skipped = [one for one in working if one.name == "skip"]
    for one in working:
        if not skipped or no_worse(one, skipped[0]):
            return one
    return None


def _as_decision(decision: Decision, best: TrialOutcome, why: str) -> Decision:
    """What was seen to work, as far as it is another thing than what was decided."""
    if best.name == "leave out":
        if decision.action == "leave_out":
            return replace(decision, reason=why)
        return decision
    dropped: Action = "undo" if decision.action == "undo" else "skip"
    told = replace(decision, action=dropped, left_out="the step", reason=why)
    if best.name in RATES:
        return replace(told, action="lower_lr", lr_factor=RATES[best.name])
    if best.name == "eps":
        return replace(told, new_eps=best.value)
    if best.name == "clip":
        return replace(told, new_clip=best.value)
    return told


def _rewind_lower(
    context: Context,
    snapshots: Snapshots,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """A rewind that would come to the same end: with which lower rate would it not?"""
    assert decision.rewound_to is not None
    snapshot = snapshots.at(decision.rewound_to)
    kept = snapshots.kept.since(decision.rewound_to)
    if snapshot is None or not kept or decision.lr_factor is not None:
        return decision
    window = Window(start=snapshot.state, steps=as_window(kept), others=lead_up.earlier)
    found = compare_candidates(
        _subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name == "nothing" or candidate.name in RATES,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None or best.name not in RATES:
        return decision
    # other weights come of a lower rate, so the steps since cannot be run again as they were
    return replace(decision, lr_factor=RATES[best.name], data="skip", reason=_why(found, best))


def _subject(
    snapshots: Snapshots, incident: Incident, lead_up: LeadUp, window: Window
) -> TrialSubject:
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
    )


def _why(found: WhatIf, best: TrialOutcome) -> str:
    failed = [one.name for one in found.outcomes if not one.works and one.cost < best.cost]
    said = f"whatif: {best.label} keeps the bad value away for {count(found.after, 'step')}"
    if failed:
        said += f"; not so {', '.join(failed)}"
    return said


def _tell(context: Context, found: WhatIf, best: TrialOutcome | None) -> None:
    said = "nothing that was tried helps" if best is None else _why(found, best)
    trials = [
        {
            "name": one.name,
            "works": one.works,
            "bad_value": one.bad_value,
            "loss": one.loss,
            "held_out": one.held_out,
        }
        for one in found.outcomes
    ]
    context.outputs.note(
        "whatif", said.removeprefix("whatif: "), step=found.step, trials=trials, steps=found.steps
    )

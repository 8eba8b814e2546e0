"""Try what would have helped: for `guard.whatif()`, and before a decision is applied."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepguard._errors import CapsuleError, ConfigError, StateError
from stepguard.engine.context import Context, bare_step
from stepguard.engine.hooks import LeadUp
from stepguard.engine.incident.situation import as_window, why_not
from stepguard.engine.recover.snapshots import SnapshotKeeper
from stepguard.probes.whatif_candidates import Candidate, OwnFix, no_worse
from stepguard.probes.whatif_trial import TrialSubject, compare_candidates, copied_state
from stepguard.records import Action, Decision, Incident
from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.report import probes as table
from stepguard.report.phrases import count
from stepguard.state.capsule import Window, WindowStep, read_capsule, read_window
from stepguard.state.rng import kept_rng

# --- Try, on the way that led to the last incident, what would have helped.


NOTHING_MOVED = ("skip", "undo", "stop")
"""Decisions after which the weights are those that the bad step began from."""


def try_what_helps(context: Context, snapshots: SnapshotKeeper, own: OwnFix | None) -> WhatIf:
    """Try the candidates for the last incident, and show what they came to.

    Raises ConfigError with the reason where it cannot.
    """
    if not context.incidents:
        raise ConfigError("there is no incident yet: whatif looks at what went wrong.")
    subject = _subject(context, snapshots)
    quiet = context.config.terminal != "auto"
    try:
        with kept_rng(), table.progress_bar(None if quiet else sys.stderr) as progress:
            found = compare_candidates(subject, own=own, progress=progress)
    except StateError as why:
        raise ConfigError(f"whatif cannot copy the state of this run: {why}") from None
    if not quiet:
        table.show(found, sys.stdout)
    return found


def _subject(context: Context, snapshots: SnapshotKeeper) -> TrialSubject:
    """The last bad step; of several in a row, the first."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != context.incidents[-1].id:
        why = why_not(context, bare_step(context))
        raise ConfigError(why or "nothing was kept of the last incident to try anything on.")
    failed = [*lead_up.failed_before, lead_up.bad]
    lead_up = lead_up.first or lead_up
    failed = [one for one in failed if one.index != lead_up.bad.index]
    incident = next(one for one in context.incidents if one.id == lead_up.incident)
    window = _window(context, snapshots, lead_up, incident)
    following = lead_up.bad.index + 1
    failed_next = any(one.step == following for one in context.incidents)
    # Is neither a sample nor the batch to blame, so that any batch may fail?
    if incident.reading.bad_inputs or incident.origin is None:
        by_no_sample = False
    else:
        by_no_sample = not incident.origin.samples
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
        failed_before=failed if by_no_sample else [],
        failed_next=following if failed_next else None,
    )


def _window(
    context: Context, snapshots: SnapshotKeeper, lead_up: LeadUp, incident: Incident
) -> Window:
    """The steps in memory; else, once the run has gone on, those on disk."""
    later = [kept for kept in snapshots.kept.intact() if kept.step.index > lead_up.bad.index]
    others = [*lead_up.earlier, *as_window(later)]
    snapshot = lead_up.snapshot
    if snapshot is not None and not snapshot.overwritten:
        return Window(start=snapshot.state, steps=lead_up.steps, others=others)
    # Are the present weights still those that the bad step began from?
    decision = incident.decision
    if decision is None or decision.action not in NOTHING_MOVED or decision.rewound_to is not None:
        nothing_moved_since = False
    else:
        unmoved = context.history.committed == lead_up.committed
        nothing_moved_since = unmoved or context.step - lead_up.bad.index in (0, 1)
    if nothing_moved_since:
        return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    if incident.capsule is not None and incident.run is not None:
        return window_on_disk(Path(incident.run) / incident.capsule, others)
    raise ConfigError(
        "the state before the incident is gone: call guard.whatif() sooner, or give "
        "GuardConfig(run_dir=...), so that it is kept on disk."
    )


def window_on_disk(capsule: Path, others: list[WindowStep]) -> Window:
    """What a capsule keeps of the way to its step; at least the state before it."""
    try:
        window = read_window(capsule)
        if window is None:
            content = read_capsule(capsule)
            window = Window(start=content.saved_state(), steps=[])
    except CapsuleError as why:
        raise ConfigError(f"the state before the incident is gone from memory, and {why}") from None
    return replace(window, others=[*window.others, *others])


# --- `Policy(on_incident="whatif")`: try what helps before deciding, and do the cheapest that
# works.


MOST_TRIED = 20
"""Incidents of a run that are tried: one that fails all the time must not spend its time on it."""
DROPS_THE_STEP = ("skip", "undo", "leave_out")
APPLICABLE = ("leave out", "skip", "eps", "clip", "lr x0.5", "lr x0.1")
"""What a guard can do by itself, and take back by a rewind."""
RATES = {"lr x0.5": 0.5, "lr x0.1": 0.1}


def what_helps(
    context: Context, snapshots: SnapshotKeeper, incident: Incident, decision: Decision
) -> Decision:
    """The decision after trials: the same, or one that was seen to work. The journal says why."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != incident.id or len(context.incidents) >= MOST_TRIED:
        return decision
    if decision.action in DROPS_THE_STEP:
        return _instead_of_skipping(context, snapshots, incident, decision, lead_up)
    if decision.action == "rewind":
        return _rewind_lower(context, snapshots, incident, decision, lead_up)
    return decision


def _instead_of_skipping(
    context: Context,
    snapshots: SnapshotKeeper,
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
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name in APPLICABLE,
        adapt=_without_the_step,
        usual_norm=statistics.median(norms) if norms else None,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None:
        return decision
    # What was seen to work, as far as it is another thing than what was decided.
    why = _why(found, best)
    if best.name == "leave out":
        if decision.action == "leave_out":
            return replace(decision, reason=why)
        return decision
    dropped: Action = "undo" if decision.action == "undo" else "skip"
    told = replace(decision, action=dropped, left_out="the step", reason=why)
    if best.name in RATES:
        return replace(told, lr_factor=RATES[best.name])
    if best.name == "eps":
        return replace(told, new_eps=best.value)
    if best.name == "clip":
        return replace(told, new_clip=best.value)
    return told


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


def _rewind_lower(
    context: Context,
    snapshots: SnapshotKeeper,
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
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name == "nothing" or candidate.name in RATES,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None or best.name not in RATES:
        return decision
    # other weights come of a lower rate, so the steps since cannot be run again as they were
    return replace(decision, lr_factor=RATES[best.name], data="skip", reason=_why(found, best))


def _whatif_decision_subject(
    snapshots: SnapshotKeeper, incident: Incident, lead_up: LeadUp, window: Window
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

"""Try, on the way that led to the last incident, what would have helped."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from stepguard._errors import CapsuleError, ConfigError, StateError
from stepguard.engine.context import Context, bare_step
from stepguard.engine.incident.lead_up import as_window, why_not
from stepguard.engine.recover.snapshots import Snapshots
from stepguard.records import Incident
from stepguard.records.whatif import WhatIf
from stepguard.report import whatif as table
from stepguard.state.capsule import read_capsule
from stepguard.state.rng import kept_rng
from stepguard.state.steps_before import Window, WindowStep, read_window
from stepguard.whatif.candidates import OwnFix
from stepguard.whatif.comparison import compare_candidates
from stepguard.whatif.subject import LeadUp, TrialSubject
from stepguard.whatif.undone import copied_state

NOTHING_MOVED = ("skip", "undo", "stop", "lower_lr")
"""Decisions after which the weights are those that the bad step began from."""


def try_what_helps(context: Context, snapshots: Snapshots, own: OwnFix | None) -> WhatIf:
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


def _subject(context: Context, snapshots: Snapshots) -> TrialSubject:
    """The last bad step; of several in a row, the first."""
    lead_up = context.lead_up
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
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
        failed_before=failed if _by_no_sample(incident) else [],
        failed_next=following if failed_next else None,
    )


def _by_no_sample(incident: Incident) -> bool:
    """Is neither a sample nor the batch to blame, so that any batch may fail?"""
    if incident.reading.bad_inputs or incident.origin is None:
        return False
    return not incident.origin.samples


def _window(context: Context, snapshots: Snapshots, lead_up: LeadUp, incident: Incident) -> Window:
    """The steps in memory; else, once the run has gone on, those on disk."""
    later = [kept for kept in snapshots.kept.intact() if kept.step.index > lead_up.bad.index]
    others = [*lead_up.earlier, *as_window(later)]
    snapshot = lead_up.snapshot
    if snapshot is not None and not snapshot.overwritten:
        return Window(start=snapshot.state, steps=lead_up.steps, others=others)
    if _nothing_moved_since(context, lead_up, incident):
        return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    if incident.capsule is not None and incident.run is not None:
        return window_on_disk(Path(incident.run) / incident.capsule, others)
    raise ConfigError(
        "the state before the incident is gone: call guard.whatif() sooner, or give "
        "GuardConfig(run_dir=...), so that it is kept on disk."
    )


def _nothing_moved_since(context: Context, lead_up: LeadUp, incident: Incident) -> bool:
    """Are the present weights still those that the bad step began from?"""
    decision = incident.decision
    if decision is None or decision.action not in NOTHING_MOVED or decision.rewound_to is not None:
        return False
    unmoved = context.history.committed == lead_up.committed
    return unmoved or context.step - lead_up.bad.index in (0, 1)


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

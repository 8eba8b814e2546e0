"""Try on a capsule what would have helped, with the objects of the user's own program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepguard._errors import CapsuleError, StateError
from stepguard.records import Incident
from stepguard.records.whatif import WhatIf
from stepguard.run.replay import replay
from stepguard.state.capsule import Capsule, read_capsule
from stepguard.state.importing import import_function, importable
from stepguard.state.run_state import RunState
from stepguard.state.step import Step
from stepguard.state.steps_before import Window, read_window, window_step
from stepguard.whatif.candidates import OwnFix
from stepguard.whatif.comparison import Progress, compare_candidates
from stepguard.whatif.subject import TrialSubject


def whatif(
    path: str | Path,
    *,
    build: str | Callable[[], Any] | None = None,
    script: str | None = None,
    own: str | OwnFix | None = None,
    progress: Progress = lambda done, total, name: None,
) -> WhatIf:
    """Train the steps of a capsule, or of the newest one of a run. Raises CapsuleError."""
    folder = capsule_of(Path(path))
    content = read_capsule(folder)
    fix = own
    if isinstance(own, str):
        with importable():
            fix = import_function(own, CapsuleError)
    assert not isinstance(fix, str)
    found: list[WhatIf] = []

    def try_all(step: Step, incident: Incident) -> None:
        named = replace(incident, id=_name(content.folder))
        found.append(_tried(content, step, named, fix, progress))

    replay(folder, build=build, script=script, inspect=try_all)
    return found[0]


def _tried(
    content: Capsule, step: Step, incident: Incident, own: OwnFix | None, progress: Progress
) -> WhatIf:
    window = read_window(content.folder) or Window(start=content.saved_state(), steps=[])
    subject = TrialSubject(
        step=step,
        bad=window_step(step, incident.reading.loss, incident.reading.lr),
        window=window,
        run_state=RunState(step.named_roots(), step.optimizer),
        incident=incident,
    )
    try:
        return compare_candidates(subject, own=own, progress=progress)
    except StateError as why:
        raise CapsuleError(f"{content.folder} cannot be tried: {why}") from None


def capsule_of(path: Path) -> Path:
    """The capsule at this path; of a run directory, the one that was written last."""
    folder = path.parent if path.name == "journal.jsonl" else path
    if not (folder / "incidents").is_dir():
        return folder
    written = sorted(folder.glob("incidents/*/capsule/capsule.json"), key=_written)
    if not written:
        raise CapsuleError(
            f"{folder} holds no capsule: steps of guard.step with a batch that can be kept have "
            "one, unless GuardConfig(capsule='off')."
        )
    return written[-1].parent


def _written(file: Path) -> tuple[float, str]:
    return file.stat().st_mtime, str(file)


def _name(capsule: Path) -> str:
    if capsule.name == "capsule":
        return capsule.resolve().parent.name
    return capsule.name

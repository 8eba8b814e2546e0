"""Try on a capsule what would have helped, with the objects of the user's own program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepguard._errors import CapsuleError, JournalError, StateError
from stepguard.engine.incident.lead_up import SHORTLY
from stepguard.journal import read_run
from stepguard.records import Incident
from stepguard.records.whatif import WhatIf
from stepguard.run.replay import Confirm, replay
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
    confirm: Confirm = lambda command: False,
) -> WhatIf:
    """Train the steps of a capsule, or of the last chain of incidents of a run.

    Raises CapsuleError.
    """
    folder, failed_next = capsule_of(Path(path))
    content = read_capsule(folder)
    fix = own
    if isinstance(own, str):
        with importable():
            fix = import_function(own, CapsuleError)
    assert not isinstance(fix, str)
    found: list[WhatIf] = []

    def try_all(step: Step, incident: Incident) -> None:
        named = replace(incident, id=_name(content.folder))
        found.append(_tried(content, step, named, fix, progress, failed_next))

    replay(folder, build=build, script=script, inspect=try_all, confirm=confirm)
    return found[0]


def _tried(
    content: Capsule,
    step: Step,
    incident: Incident,
    own: OwnFix | None,
    progress: Progress,
    failed_next: int | None,
) -> WhatIf:
    window = read_window(content.folder) or Window(start=content.saved_state(), steps=[])
    subject = TrialSubject(
        step=step,
        bad=window_step(step, incident.reading.loss, incident.reading.lr),
        window=window,
        run_state=RunState(step.named_roots(), step.optimizer),
        incident=incident,
        failed_next=failed_next,
    )
    try:
        return compare_candidates(subject, own=own, progress=progress)
    except StateError as why:
        raise CapsuleError(f"{content.folder} cannot be tried: {why}") from None


def capsule_of(
    path: Path, wanted: Callable[[Incident], bool] = lambda incident: True
) -> tuple[Path, int | None]:
    """The capsule at this path; of a run, the first one of its last chain of incidents.

    The first that is `wanted`, if any is. Beside it the step after that one, where the journal
    shows that it failed as well.
    """
    folder = path.parent if path.name == "journal.jsonl" else path
    if not (folder / "incidents").is_dir():
        incident = folder.resolve().parent if folder.name == "capsule" else folder.resolve()
        return folder, _failed_next(_incidents(incident.parent.parent), incident.name)
    known = _incidents(folder)
    with_capsule = [one for one in known if one.capsule and (folder / one.capsule).is_dir()]
    written = sorted(folder.glob("incidents/*/capsule/capsule.json"))
    if not with_capsule and written:
        # without a journal: the last by its name, which begins with its step
        return written[-1].parent, None
    if not with_capsule:
        raise CapsuleError(
            f"{folder} holds no capsule: steps of guard.step with a batch that can be kept have "
            "one, unless GuardConfig(capsule='off')."
        )
    chain = len(known) - 1
    # a rewind leads back to earlier steps
    while chain and known[chain - 1].step >= known[chain].step - SHORTLY:
        chain -= 1
    kept = [one for one in known[chain:] if one in with_capsule] or with_capsule[-1:]
    chosen = next(filter(wanted, kept), kept[0])
    return folder / str(chosen.capsule), _failed_next(known, chosen.id)


def _incidents(run: Path) -> list[Incident]:
    """What the journal tells of a run; nothing where there is none."""
    try:
        return read_run(run).incidents
    except (OSError, JournalError):
        return []


def _failed_next(known: list[Incident], name: str) -> int | None:
    step = next((one.step for one in known if one.id == name), None)
    if step is None or all(one.step != step + 1 for one in known):
        return None
    return step + 1


def _name(capsule: Path) -> str:
    if capsule.name == "capsule":
        return capsule.resolve().parent.name
    return capsule.name

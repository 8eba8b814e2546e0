"""Stop the run: tell people and launchers, and raise TrainingHalted."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from types import TracebackType
from typing import Literal, get_args

from stepguard._errors import EXIT_HALTED, TrainingHalted
from stepguard.engine.context import Context
from stepguard.engine.recover.rewind import Rewinder
from stepguard.records import Incident

Restart = Literal["helps", "same-place", "no"]
"""`helps`: the fault was transient, or the restart passes over it. `same-place`: a restart with the
same data and settings comes to the same stop. `no`: nothing good is left to start from, or the
program itself has to be changed.
"""


def halt(context: Context, rewinder: Rewinder, incident: Incident, state: Path | None) -> None:
    """Raise TrainingHalted; `state` is where the newest good state was left."""
    restart: Restart = "no"
    if state is not None:
        restart = "same-place" if incident.step in rewinder.past.stopped_at else "helps"
    cause = incident.findings[0].code if incident.findings else incident.verdict.kind
    line = exit_line(step=incident.step, cause=cause, restart=restart, state=state)
    context.outputs.halted(incident, line)
    exit_with_code_three()
    where = str(state) if state is not None else None
    raise TrainingHalted(incident, state=where, restart=restart)


def exit_line(
    *, step: int, cause: str, restart: Restart, state: str | PurePath | None = None
) -> str:
    """The line on stderr by which a launcher learns that the run stopped and if a restart helps.

    `stepguard: HALTED step=48 cause=SG204 restart=same-place state=runs/a/checkpoints/step-40`,
    without a newline. `cause` is the code of the first finding, or the kind of the verdict where
    nothing was found. `state` is where the newest good state lies; it stands last, so that a path
    with blanks is everything up to the end of the line.
    """
    if restart not in get_args(Restart):
        raise ValueError(
            f"restart={restart!r} is not known; use one of {', '.join(get_args(Restart))}."
        )
    where = _one_line(str(state or "")) or "none"
    word = "-".join(_one_line(cause).split()) or "unknown"
    return f"stepguard: HALTED step={step} cause={word} restart={restart} state={where}"


def _one_line(text: str) -> str:
    """Replace what does not print: a path may hold a newline, a line may not."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def exit_with_code_three() -> None:
    """Let an uncaught TrainingHalted end the process with exit code 3 instead of Python's 1."""
    previous = sys.excepthook
    if getattr(previous, "_stepguard", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, TrainingHalted):
            previous(kind, value, trace)
            return
        print(f"stepguard: {value}", file=sys.stderr)
        raise SystemExit(EXIT_HALTED)

    hook._stepguard = True  # type: ignore[attr-defined]
    hook._previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook

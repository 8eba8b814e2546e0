"""Stop the run: tell people and launchers, and raise TrainingHalted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from stepguard._errors import EXIT_HALTED, TrainingHalted
from stepguard.engine.context import Context
from stepguard.engine.incident.exit_line import Restart, exit_line
from stepguard.engine.recover.rewind import Recovery
from stepguard.records import Incident


def halt(context: Context, recovery: Recovery, incident: Incident, state: Path | None) -> None:
    """Raise TrainingHalted; `state` is where the newest good state was left."""
    restart: Restart = "no"
    if state is not None:
        restart = "same-place" if incident.step in recovery.past.stopped_at else "helps"
    cause = incident.findings[0].code if incident.findings else incident.verdict.kind
    line = exit_line(step=incident.step, cause=cause, restart=restart, state=state)
    context.outputs.halted(incident, line)
    exit_with_code_three()
    where = str(state) if state is not None else None
    raise TrainingHalted(incident, state=where, restart=restart)


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

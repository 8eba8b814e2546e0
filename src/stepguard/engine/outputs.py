"""What a run is written to. An output that fails costs what it would have held, said once; the
protection goes on.

While one fails it is tried again, less and less often; when it works again, a line says what was
lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from stepguard.engine.protect import quiet_warning
from stepguard.journal import Journal
from stepguard.records import Incident, Reading
from stepguard.report.humanlog import HumanLog
from stepguard.report.screen import Paint
from stepguard.report.terminal import Terminal

P = ParamSpec("P")
Say = Callable[[str], None]
RARELY = 64
"""While an output fails, at least one of so many writes tries it again."""


class OutputLost(RuntimeWarning):
    """The journal, the readable log or another output cannot be written. The run is still
    protected.
    """


class Output:
    """One of them, by the name it has in messages."""

    def __init__(self, name: str, say: Say) -> None:
        self.name, self._say = name, say
        self._lost = 0
        """Writes lost since it last worked."""
        self._failures = 0
        """How often it has begun to fail."""
        self._saying = False

    def put(self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Write; False where it could not be. Never raises for the output's own failure."""
        if self._saying:  # a word about its own failure
            with contextlib.suppress(Exception):
                write(*args, **kwargs)
            return False
        try:
            write(*args, **kwargs)
        except Exception as fault:
            self._failed(fault)
            return False
        lost, self._lost = self._lost, 0
        if lost and self._worth_saying():
            self._tell(f"{self.name} can be written again; {lost} of its records are lost")
        return True

    def put_often(self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """For what comes with every step: after a failure only the 1st, 2nd, 4th, 8th, ... and
        every 64th is tried.
        """
        if _power_of_two(self._lost) or self._lost % RARELY == 0:
            return self.put(write, *args, **kwargs)
        self._lost += 1
        return False

    def _worth_saying(self) -> bool:
        """A disk that is nearly full fails again and again."""
        return _power_of_two(self._failures)

    def _failed(self, fault: Exception) -> None:
        self._lost += 1
        if self._lost > 1:
            return
        self._failures += 1
        summary = (
            f"{self.name} cannot be written: {type(fault).__name__}: {fault}. The run is "
            f"still protected"
        )
        if self._worth_saying():
            self._tell(summary)
        if self._failures == 1:
            quiet_warning(f"stepguard: {summary}.", OutputLost)

    def _tell(self, summary: str) -> None:
        self._saying = True
        try:
            self._say(summary)
        finally:
            self._saying = False


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class JournalOutput:
    """The journal of one guard."""

    def __init__(self, journal: Journal, say: Say) -> None:
        self._journal, self._output = journal, Output(f"the journal {journal.path}", say)

    @property
    def path(self) -> Path:
        return self._journal.path

    def write(self, kind: str, fields: dict[str, Any], *, durable: bool = False) -> None:
        self._output.put(self._journal.write, kind, fields, durable=durable)

    def write_step(self, reading: Reading, *, committed: bool) -> None:
        self._output.put_often(self._journal.write_step, reading, committed=committed)

    def write_incident(self, incident: Incident) -> None:
        self._output.put(self._journal.write_incident, incident)

    def close(self) -> None:
        self._journal.close()


class LogOutput:
    """The readable log of one guard."""

    def __init__(self, log: HumanLog, say: Say) -> None:
        self._log, self._output = log, Output(f"the readable log in {log.folder}", say)

    def step(self, reading: Reading, *, committed: bool = True) -> None:
        self._output.put_often(self._log.step, reading, committed=committed)

    def incident(self, incident: Incident) -> None:
        self._output.put(self._log.incident, incident)

    def note(self, verdict_summary: str, step: int, kind: str) -> None:
        self._output.put(self._log.note, verdict_summary, step, kind)

    def fault(self, message: str) -> None:
        self._output.put(self._log.fault, message)

    def line(self, text: str) -> None:
        self._output.put(self._log.line, text)

    def close(self) -> None:
        self._log.close()


class TerminalOutput(Terminal):
    """The terminal of one guard: what cannot be drawn is not drawn."""

    _output: Output | None = None

    def told_by(self, say: Say) -> None:
        """Where its failure goes on record."""
        self._output = Output("the terminal report", say)

    def _paint(self, paint: Paint) -> None:
        if self._output is None:
            super()._paint(paint)
        else:
            self._output.put(super()._paint, paint)

"""Messages for people as records of Python's `logging`, under the logger `stepguard`.

INFO: notes on what the guard does. WARNING: incidents, anomalies, refused saves and other losses.
ERROR: the policy stopped the run, or the guard disarmed itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from stepguard.records import Incident, Sink
from stepguard.report import messages

LOGGER = logging.getLogger("stepguard")
INFORMATION = frozenset(
    {
        "callback-only",
        "loader",
        "restored",
        "scale_calibration",
        "schedule",
        "signal",
        "snapshots",
        "tracing",
    }
)
"""Kinds of notes that report nothing bad; all others are warnings."""


class LoggingSink(Sink):
    """Logs every message for people once, in one line.

    Records carry `step` and `kind`, for filters. With `propagate` the handlers of the root logger
    get them too; without, only handlers that were added to the logger `stepguard` itself.
    """

    def __init__(self, *, propagate: bool, whose: Callable[[], str] = str) -> None:
        self._propagate = propagate
        self._whose = whose

    def incident(self, incident: Incident) -> None:
        text = messages.incident_line(incident)
        self._log(logging.WARNING, text, step=incident.step, kind=incident.verdict.kind)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        step = fields.get("step")
        if kind == "fault":
            self._log(logging.ERROR, messages.disarmed(fields), step=step, kind="fault")
        elif kind == "note":
            topic = str(fields.get("kind"))
            level = logging.INFO if topic in INFORMATION else logging.WARNING
            self._log(level, messages.note_line(fields), step=step, kind=topic)

    def halted(self, incident: Incident, exit_line: str) -> None:
        text = messages.stopping(incident)
        self._log(logging.ERROR, text, step=incident.step, kind="halted")
        self._log(logging.ERROR, exit_line, step=incident.step, kind="halted")

    def _log(self, level: int, text: str, **fields: Any) -> None:
        if not LOGGER.isEnabledFor(level):
            return
        whose = self._whose()
        if whose:
            text = f"({whose}) {text}"
        if self._propagate:
            LOGGER.log(level, text, extra=fields)
            return
        # The terminal prints these messages already. A handler of the root logger, which
        # logging.basicConfig adds, would print each of them a second time.
        record = LOGGER.makeRecord(LOGGER.name, level, __file__, 0, text, (), None, extra=fields)
        if not LOGGER.filter(record):
            return
        for handler in LOGGER.handlers:
            if level >= handler.level:
                handler.handle(record)

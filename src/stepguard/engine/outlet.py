"""Passing a run's events on to the user's loggers. One that fails is dropped with a warning;
training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stepguard.engine.protect import quiet_warning
from stepguard.records import Incident, Reading, Sink

Say = Callable[[str], None]


class SinkDropped(RuntimeWarning):
    """A logger failed and hears no more of this run; the journal does."""


class Outlet:
    """The sinks of one guard, on rank 0; on other ranks there are none."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)
        self.say: Say = lambda summary: None
        """Where the loss of a sink goes on record."""

    def step(self, reading: Reading, *, committed: bool) -> None:
        self._each(lambda sink: sink.step(reading, committed))

    def incident(self, incident: Incident) -> None:
        self._each(lambda sink: sink.incident(incident))

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.note(kind, fields))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, tell: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                if sink in self._sinks:  # not dropped while another one was
                    tell(sink)
            except Exception as fault:
                self._drop(sink, fault)

    def _drop(self, sink: Sink, fault: Exception) -> None:
        self._sinks.remove(sink)
        summary = (
            f"{sink!r} failed and is dropped, training goes on without it: "
            f"{type(fault).__name__}: {fault}"
        )
        self.say(summary)
        quiet_warning(f"stepguard: {summary}", SinkDropped)

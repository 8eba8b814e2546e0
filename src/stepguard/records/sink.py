"""What a run's events are passed on to: journal, readable log, terminal, TensorBoard, your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepguard.records.incident import Incident
from stepguard.records.look import Look
from stepguard.records.reading import Reading


class Sink:
    """Receives a run's events as they happen. Override what you need.

        class Pager(stepguard.Sink):
            def incident(self, incident):
                page(incident.summary)

        guard = stepguard.Guard(model, optimizer, config=GuardConfig(sinks=(Pager(),)))

    A sink of yours is called on rank 0; if it raises, it is dropped and training continues.
    """

    def step(self, reading: Reading, committed: bool) -> None:
        """A step was read; `committed` is False when its update did not happen."""

    def incident(self, incident: Incident) -> None:
        """A step was bad: called once, when it has been dealt with and all is known about it."""

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Any other line of the journal: a note, a fault of the guard's own, the end of the run."""

    def look(self, look: Look) -> None:
        """A deep look was taken at a healthy step."""

    def halted(self, incident: Incident, exit_line: str) -> None:
        """The policy stops the run for this incident; `exit_line` says so to launch scripts."""

    def close(self) -> None:
        """The guard is closed: flush, and close what this sink opened itself.

        A sink that several guards share may get further events, and opens itself again.
        """

    def __repr__(self) -> str:
        return type(self).__name__

"""Shared by the logger sinks: which steps are sent, and how incidents are counted."""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module
from typing import Any

from stepguard._errors import ConfigError
from stepguard.records import Incident, Reading
from stepguard.records.incident import Sink
from stepguard.report.sinks import INCIDENTS, NONFINITE, PREFIX, SKIPPED, finite_only, scalars


class ScalarSink(Sink):
    """Sends every step, or every few, as named numbers; a bad or skipped one always."""

    keeps_nonfinite = False
    """Can the backend store NaN and Inf? Otherwise they are left out, and `nonfinite` says so."""

    def __init__(self, *, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"{type(self).__name__}: every={every!r} must be a whole number of at least 1."
            )
        self.every = every
        self._incidents = 0
        self._held: tuple[int, dict[str, float]] | None = None
        """A step that was not committed: its incident comes after it and is counted with it."""

    def step(self, reading: Reading, committed: bool) -> None:
        self._send_held()
        values = scalars(reading, committed=committed)
        if self.due(reading.step) or values[NONFINITE] or values[SKIPPED]:
            if not self.keeps_nonfinite:
                values = finite_only(values)
            self._held = (reading.step, values)
        if committed:
            self._send_held()

    def incident(self, incident: Incident) -> None:
        self._incidents += 1
        self._send_held()
        self.tell(incident)

    def close(self) -> None:
        """Send what is held back. A sink that closes something itself calls this first."""
        self._send_held()

    def _send_held(self) -> None:
        held = self._held
        self._held = None
        if held is not None:
            step, values = held
            self.send({**values, INCIDENTS: float(self._incidents)}, step)

    def due(self, step: int) -> bool:
        """Is a healthy step sent?"""
        return step % self.every == 0

    @abstractmethod
    def send(self, values: dict[str, float], step: int) -> None:
        """Send the numbers of one optimizer step."""

    def tell(self, incident: Incident) -> None:
        """Show an incident, in a backend that can show more than numbers."""


class GaugeSink(ScalarSink):
    """Sends to gauges that are made on first use, and counts incidents by kind and cause."""

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._gauges: dict[str, Any] = {}

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in {**values, f"{PREFIX}step": float(step)}.items():
            # The counter has the incidents.
            if name == INCIDENTS:
                continue
            if name not in self._gauges:
                self._gauges[name] = self.gauge(name)
            self._gauges[name].set(value)

    @abstractmethod
    def gauge(self, name: str) -> Any:
        """Make the gauge of this name."""


def labels_of(incident: Incident) -> dict[str, str]:
    """What incidents are counted by; empty where it is not known."""
    labels = {"kind": incident.verdict.kind, "code": "", "action": ""}
    if incident.findings:
        labels["code"] = incident.findings[0].code
    if incident.decision is not None:
        labels["action"] = incident.decision.action
    return labels


def active_run(sink: Sink, given: Any, active: Any, start: str, argument: str = "run") -> Any:
    """The run that was given, else the active one; ConfigError where there is none."""
    if given is not None:
        return given
    if active is None:
        name = type(sink).__name__
        raise ConfigError(
            f"{name} found no active run: call {start} first, or give {name}({argument})."
        )
    return active


def backend(module: str, extra: str, sink: str) -> Any:
    """Import the library behind a sink, or raise a ConfigError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as missing:
        raise ConfigError(
            f"{sink} needs {missing.name or module}: pip install 'stepguard[{extra}]'."
        ) from missing

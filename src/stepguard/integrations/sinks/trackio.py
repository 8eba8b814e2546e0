"""trackio. Its store keeps NaN and Inf as they are."""

from __future__ import annotations

from typing import Any

from stepguard.integrations.sinks.base import ScalarSink, active_run, backend
from stepguard.records import Incident
from stepguard.report.sinks import PREFIX

STEP = PREFIX + "step"


class TrackioSink(ScalarSink):
    """Logs to `run`, or to the active run of `trackio.init`, which is never finished here."""

    keeps_nonfinite = True

    def __init__(self, run: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._active = backend("trackio.context_vars", "trackio", "TrackioSink").current_run
        self._given = run

    @property
    def _run(self) -> Any:
        return active_run(self, self._given, self._active.get(), "trackio.init(project=...)")

    def send(self, values: dict[str, float], step: int) -> None:
        # A value and not `step=`: that would move the step trackio counts for the user's own logs.
        self._run.log({**values, STEP: step})

    def tell(self, incident: Incident) -> None:
        title = f"stepguard: {incident.verdict.kind} at step {incident.step}"
        self._run.alert(title=title, text=incident.summary)

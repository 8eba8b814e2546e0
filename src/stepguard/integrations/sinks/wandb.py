"""Weights & Biases. It drops NaN and Inf from curves, so only finite numbers are sent."""

from __future__ import annotations

from typing import Any

from stepguard.integrations.sinks.base import ScalarSink, active_run, backend
from stepguard.records import Incident
from stepguard.report.sinks import PREFIX

STEP = PREFIX + "step"
TITLE_LIMIT = 60
"""Characters of an alert's title."""


class WandbSink(ScalarSink):
    """Logs to `run`, or to the active `wandb.run`, which is never started or finished here."""

    def __init__(self, run: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._module = backend("wandb", "wandb", "WandbSink")
        self._given = run
        self._prepared: Any | None = None

    @property
    def _run(self) -> Any:
        run = active_run(self, self._given, self._module.run, "wandb.init()")
        if run is not self._prepared:
            # A step axis of its own: `step=` would clash with the steps that wandb counts for the
            # user's own run.log calls.
            run.define_metric(STEP, hidden=True)
            run.define_metric(f"{PREFIX}*", step_metric=STEP)
            self._prepared = run
        return run

    def send(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, STEP: step})

    def tell(self, incident: Incident) -> None:
        title = f"stepguard: {incident.verdict.kind} at step {incident.step}"
        self._run.alert(title=title[:TITLE_LIMIT], text=incident.summary)

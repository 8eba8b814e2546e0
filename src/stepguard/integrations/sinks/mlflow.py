"""MLflow. A database store keeps Inf as 1.8e308, so only finite numbers are sent."""

from __future__ import annotations

import time

from stepguard.integrations.sinks.base import ScalarSink, active_run, backend
from stepguard.records import Incident
from stepguard.records.codec import to_plain
from stepguard.report.sinks import PREFIX


class MlflowSink(ScalarSink):
    """Logs to `run_id`, or to the active run, which is never started or ended here."""

    def __init__(
        self, run_id: str | None = None, *, tracking_uri: str | None = None, every: int = 1
    ) -> None:
        super().__init__(every=every)
        self._module = backend("mlflow", "mlflow", "MlflowSink")
        self._given = run_id
        self._client = self._module.MlflowClient(tracking_uri=tracking_uri)

    @property
    def _run_id(self) -> str:
        active = self._module.active_run()
        now = None if active is None else str(active.info.run_id)
        return str(active_run(self, self._given, now, "mlflow.start_run()", "id"))

    def send(self, values: dict[str, float], step: int) -> None:
        metric = self._module.entities.Metric
        now = int(time.time() * 1000)
        metrics = [metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def tell(self, incident: Incident) -> None:
        self._client.set_tag(self._run_id, f"{PREFIX}last_incident", incident.summary)
        path = f"{PREFIX}incidents/{incident.id}.json"
        self._client.log_dict(self._run_id, to_plain(incident), path)

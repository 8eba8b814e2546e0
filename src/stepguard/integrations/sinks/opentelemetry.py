"""OpenTelemetry. It drops NaN, so only finite numbers are sent; incidents are counted by cause."""

from __future__ import annotations

import re
from typing import Any

from stepguard.integrations.sinks.base import ScalarSink, backend
from stepguard.records import Incident
from stepguard.report.sinks import INCIDENTS


class OpenTelemetrySink(ScalarSink):
    """Gauges and a counter of one meter, by default of the process's own `meter_provider`."""

    def __init__(self, meter_provider: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        module = backend("opentelemetry.metrics", "otel", "OpenTelemetrySink")
        self._meter = module.get_meter("stepguard", meter_provider=meter_provider)
        self._counter = self._meter.create_counter(
            "stepguard.incidents", description="Bad steps so far"
        )
        self._gauges: dict[str, Any] = {}

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in {**values, "stepguard/step": float(step)}.items():
            # The counter has the incidents, by kind and cause.
            if name != INCIDENTS:
                self._gauge(name).set(value)

    def tell(self, incident: Incident) -> None:
        told: dict[str, str] = {"kind": incident.verdict.kind}
        if incident.findings:
            told["code"] = incident.findings[0].code
        if incident.decision is not None:
            told["action"] = incident.decision.action
        self._counter.add(1, told)

    def _gauge(self, name: str) -> Any:
        plain = re.sub(r"[^a-zA-Z0-9_.]", "_", name.replace("/", "."))
        if plain not in self._gauges:
            self._gauges[plain] = self._meter.create_gauge(plain)
        return self._gauges[plain]

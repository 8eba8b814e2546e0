"""OpenTelemetry. It drops NaN, so only finite numbers are sent; incidents are counted by cause."""

from __future__ import annotations

import re
from typing import Any

from stepguard.integrations.sinks.base import GaugeSink, backend, labels_of
from stepguard.records import Incident


class OpenTelemetrySink(GaugeSink):
    """Gauges and a counter of one meter, by default of the process's own `meter_provider`."""

    def __init__(self, meter_provider: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        module = backend("opentelemetry.metrics", "otel", "OpenTelemetrySink")
        self._meter = module.get_meter("stepguard", meter_provider=meter_provider)
        self._counter = self._meter.create_counter(
            "stepguard.incidents", description="Bad steps so far"
        )

    def gauge(self, name: str) -> Any:
        return self._meter.create_gauge(re.sub(r"[^a-zA-Z0-9_.]", "_", name.replace("/", ".")))

    def tell(self, incident: Incident) -> None:
        known = {name: value for name, value in labels_of(incident).items() if value}
        self._counter.add(1, known)

"""Prometheus. Gauges hold NaN and Inf: left out, the last good value would still be shown."""

from __future__ import annotations

import re
from typing import Any

from stepguard.integrations.sinks.base import GaugeSink, backend, labels_of
from stepguard.records import Incident


class PrometheusSink(GaugeSink):
    """Gauges and a counter in `registry`, by default the process's own; serving them is yours."""

    keeps_nonfinite = True

    def __init__(self, registry: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._module: Any = backend("prometheus_client", "prometheus", "PrometheusSink")
        self._registry = registry if registry is not None else self._module.REGISTRY
        self._counter: Any | None = None

    def gauge(self, name: str) -> Any:
        plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        return self._module.Gauge(plain, f"{name} of the last step", registry=self._registry)

    def tell(self, incident: Incident) -> None:
        labels = labels_of(incident)
        if self._counter is None:
            self._counter = self._module.Counter(
                "stepguard_incidents", "Bad steps so far", tuple(labels), registry=self._registry
            )
        self._counter.labels(**labels).inc()

    def close(self) -> None:
        """Take the metrics out of the registry, so that a second guard can put its own there."""
        super().close()
        for metric in (*self._gauges.values(), self._counter):
            if metric is not None:
                self._registry.unregister(metric)
        self._gauges = {}
        self._counter = None

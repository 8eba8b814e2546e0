"""Prometheus. Gauges hold NaN and Inf: left out, the last good value would still be shown."""

from __future__ import annotations

import re
from typing import Any

from stepguard.integrations.sinks.base import ScalarSink, backend
from stepguard.records import Incident
from stepguard.report.sinks import INCIDENTS


class PrometheusSink(ScalarSink):
    """Gauges and a counter in `registry`, by default the process's own; serving them is yours."""

    keeps_nonfinite = True

    def __init__(self, registry: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._module: Any = backend("prometheus_client", "prometheus", "PrometheusSink")
        self._registry = registry if registry is not None else self._module.REGISTRY
        self._gauges: dict[str, Any] = {}
        self._counter: Any | None = None

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in {**values, "stepguard/step": float(step)}.items():
            # The counter has the incidents, by kind and cause.
            if name != INCIDENTS:
                self._gauge(name).set(value)

    def tell(self, incident: Incident) -> None:
        if self._counter is None:
            self._counter = self._module.Counter(
                "stepguard_incidents",
                "Bad steps so far",
                ("kind", "code", "action"),
                registry=self._registry,
            )
        code = incident.findings[0].code if incident.findings else ""
        action = incident.decision.action if incident.decision is not None else ""
        self._counter.labels(kind=incident.verdict.kind, code=code, action=action).inc()

    def _gauge(self, name: str) -> Any:
        plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if plain not in self._gauges:
            self._gauges[plain] = self._module.Gauge(
                plain, f"{name} of the last step", registry=self._registry
            )
        return self._gauges[plain]

    def close(self) -> None:
        """Take the metrics out of the registry, so that a second guard can put its own there."""
        super().close()
        for gauge in self._gauges.values():
            self._registry.unregister(gauge)
        if self._counter is not None:
            self._registry.unregister(self._counter)
        self._gauges = {}
        self._counter = None

"""OpenTelemetry: finite numbers, and incidents by cause."""

from __future__ import annotations

import math
from typing import Any

from integrations.sink_run import BAD, train


def test_opentelemetry_gets_finite_numbers_and_counts_incidents_by_cause() -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from stepguard.integrations.sinks import OpenTelemetrySink

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    collected: list[dict[str, Any]] = []

    class Collected(OpenTelemetrySink):
        def send(self, values: dict[str, float], step: int) -> None:
            super().send(values, step)
            collected.append(points(reader))

    losses = train(Collected(provider))
    provider.shutdown()
    assert [
        step for step, found in enumerate(collected) if found["stepguard.nonfinite"][0].value == 1.0
    ] == [BAD]
    assert "stepguard.loss" not in collected[BAD] or math.isfinite(
        collected[BAD]["stepguard.loss"][0].value
    )
    assert collected[-1]["stepguard.loss"][0].value == losses[-1]
    (count,) = collected[-1]["stepguard.incidents"]
    assert (count.value, count.attributes["code"]) == (1, "SG101")


def points(reader: Any) -> dict[str, Any]:
    data = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }

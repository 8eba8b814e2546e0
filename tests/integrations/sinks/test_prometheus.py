"""Prometheus: the last step, NaN included, and incidents by cause."""

from __future__ import annotations

import math

from integrations.sink_run import BAD, STEPS, train


def test_prometheus_shows_the_last_step_and_counts_incidents_by_cause() -> None:
    import prometheus_client as prometheus

    from stepguard.integrations.sinks import PrometheusSink

    registry = prometheus.CollectorRegistry()
    seen: list[dict[str, float]] = []

    class Scraped(PrometheusSink):
        def send(self, values: dict[str, float], step: int) -> None:
            super().send(values, step)
            names = ("stepguard_loss", "stepguard_nonfinite", "stepguard_step")
            seen.append({name: registry.get_sample_value(name) for name in names})

        def close(self) -> None:
            self.text = prometheus.generate_latest(registry).decode()
            super().close()

    sink = Scraped(registry)
    losses = train(sink)
    assert math.isnan(seen[BAD]["stepguard_loss"])
    assert [step for step, values in enumerate(seen) if values["stepguard_nonfinite"] == 1.0] == [
        BAD
    ]
    assert seen[-1]["stepguard_loss"] == losses[-1]
    assert 'stepguard_incidents_total{action="skip",code="SG101",kind=' in sink.text
    train(sink)  # what the first guard registered is gone, so a second one can begin
    assert len(seen) == 2 * STEPS

"""MLflow: finite numbers, and the incident as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.sink_run import BAD, STEPS, train, without_bad


def test_mlflow_gets_finite_numbers_and_the_incident_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from stepguard.integrations.sinks import MlflowSink

    uri = f"file://{tmp_path}/runs"
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = client.create_run(client.create_experiment("nan"))
    losses = train(MlflowSink(run.info.run_id, tracking_uri=uri))
    history = client.get_metric_history(run.info.run_id, "stepguard/loss")
    assert [metric.step for metric in history] == [step for step in range(STEPS) if step != BAD]
    assert [metric.value for metric in history] == pytest.approx(without_bad(losses))
    flagged = [
        m.step
        for m in client.get_metric_history(run.info.run_id, "stepguard/nonfinite")
        if m.value == 1.0
    ]
    assert flagged == [BAD]
    assert "nonfinite" in str(next(tmp_path.rglob("stepguard/incidents/*.json")))
    assert client.get_run(run.info.run_id).info.status == "RUNNING"

"""Loggers, each with its real library, in a run whose fourth batch is NaN."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forked
import stepguard
from stepguard import ConfigError, GuardConfig
from stepguard.integrations.sinks import ScalarSink

STEPS = 6
BAD = 3


def train(*sinks: Any) -> list[float]:
    """A small run whose fourth batch is NaN; returns the losses."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(terminal="quiet", sinks=sinks)
    losses = []

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(STEPS):
            batch = torch.full((2, 3), math.nan if step == BAD else 1.0)
            losses.append(float(guard.step(loss_fn, batch).loss or 0.0))
    return losses


def without_bad(values: list[float]) -> list[float]:
    return [value for step, value in enumerate(values) if step != BAD]


class Kept(ScalarSink):
    """Remembers what would be sent."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sent: dict[int, dict[str, float]] = {}

    def send(self, values: dict[str, float], step: int) -> None:
        self.sent[step] = values


def test_only_every_nth_step_is_sent_but_a_bad_one_always() -> None:
    kept = Kept(every=5)
    train(kept)
    assert list(kept.sent) == [0, BAD, 5]
    assert [values["stepguard/incidents"] for values in kept.sent.values()] == [0.0, 1.0, 1.0]
    assert all(math.isfinite(value) for values in kept.sent.values() for value in values.values())


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_is_not_a_count_is_refused(every: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"Kept: every={every} must be a whole number of at least 1"
    ):
        Kept(every=every)


def test_a_library_that_is_not_there_is_named_with_the_way_to_get_it() -> None:
    class Absent(Kept):
        library, extra = "no_such_library", "absent"

    with pytest.raises(
        ConfigError, match=r"Absent needs no_such_library: pip install 'stepguard\[absent\]'"
    ):
        Absent()


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


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The event files read back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_the_nan_and_its_companion(tmp_path: Path) -> None:
    from stepguard.integrations.sinks import TensorBoardSink

    losses = train(TensorBoardSink(tmp_path))
    found = curves(tmp_path)
    assert [step for step, _ in found["stepguard/loss"]] == list(range(STEPS))
    shown = [value for _, value in found["stepguard/loss"]]
    assert math.isnan(shown[BAD])
    assert without_bad(shown) == pytest.approx(without_bad(losses))
    for name in ("stepguard/nonfinite", "stepguard/skipped"):
        assert [step for step, value in found[name] if value == 1.0] == [BAD]
    assert found["stepguard/lr"][0][1] == pytest.approx(0.01)


def test_a_writer_of_the_user_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    from stepguard.integrations.sinks import TensorBoardSink

    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        train(TensorBoardSink(writer=writer))
        writer.add_scalar("mine", 1.0, 99)  # type: ignore[no-untyped-call]
    assert curves(tmp_path)["mine"] == [(99, 1.0)]


# a process of its own: trackio reads its folder when it is imported, and leaves threads behind
TRACKIO = """
import json, os, sys
os.environ.update(TRACKIO_DIR={folder!r}, HF_HUB_OFFLINE="1")
sys.path.insert(0, {tests!r})
import trackio
from trackio.sqlite_storage import SQLiteStorage
from integrations.test_sinks import train
from stepguard.integrations.sinks import TrackioSink
trackio.init(project="p", name="r", embed=False, auto_log_cpu=False)
trackio.log({{"mine": 1.0}})
losses = train(TrackioSink())
trackio.log({{"mine": 2.0}})
trackio.finish()
told = [losses, SQLiteStorage.get_logs("p", "r"), SQLiteStorage.get_alerts("p")]
print("TOLD " + json.dumps(told))
"""


def test_trackio_gets_every_step_as_it_was_and_an_alert(tmp_path: Path) -> None:
    script = TRACKIO.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    done = forked.python(["-c", script])
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    losses, logs, alerts = json.loads(line.removeprefix("TOLD "))
    ours = [log for log in logs if "stepguard/step" in log]
    assert [log["stepguard/step"] for log in ours] == list(range(STEPS))
    stored = [log["stepguard/loss"] for log in ours]
    assert without_bad(stored) == pytest.approx(without_bad(losses))
    assert str(stored[BAD]) == "nan"
    assert [log["stepguard/nonfinite"] for log in ours] == [float(s == BAD) for s in range(STEPS)]
    assert [log["mine"] for log in logs if "mine" in log] == [1.0, 2.0]
    (alert,) = alerts
    assert alert["title"] == f"stepguard: nonfinite_input at step {BAD}"


@pytest.mark.process
def test_trackio_without_a_run_says_what_to_do() -> None:
    from stepguard.integrations.sinks import TrackioSink

    with pytest.warns(RuntimeWarning, match=r"TrackioSink found no active run: call trackio.init"):
        train(TrackioSink())


# a process of its own: wandb starts a service with threads that outlive the run
WANDB = """
import json, sys, wandb
sys.path.insert(0, {tests!r})
from integrations.test_sinks import train
from stepguard.integrations.sinks import WandbSink
run = wandb.init(mode="offline", dir={folder!r}, settings=wandb.Settings(silent=True))
run.log({{"mine": 1.0}})
losses = train(WandbSink())
run.log({{"mine": 2.0}})
summary = {{k: v for k, v in dict(run.summary).items() if not isinstance(v, dict)}}
print("SUMMARY " + json.dumps([losses, summary]))
run.finish()
"""


def test_wandb_gets_finite_numbers_on_an_axis_of_their_own(tmp_path: Path) -> None:
    script = WANDB.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    done = forked.python(["-c", script])
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY ")]
    losses, summary = json.loads(line.removeprefix("SUMMARY "))
    assert summary["mine"] == 2.0
    assert summary["stepguard/step"] == STEPS - 1
    assert summary["stepguard/loss"] == pytest.approx(losses[-1])
    assert summary["stepguard/incidents"] == 1.0
    history = records(next(tmp_path.rglob("*.wandb")))
    (bad,) = [record for record in history if record.get("stepguard/nonfinite") == 1.0]
    assert (bad["stepguard/step"], bad["stepguard/skipped"]) == (BAD, 1.0)
    assert "stepguard/loss" not in bad


def records(path: Path) -> list[dict[str, Any]]:
    """History lines of an offline run's file: protobuf records in the blocks of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    found, partial = [], b""
    for kind, data in chunks(path.read_bytes()):
        partial += data
        if kind in WHOLE:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(partial)
            partial = b""
            if record.WhichOneof("record_type") == "history":
                found.append(
                    {
                        i.key or ".".join(i.nested_key): json.loads(i.value_json)
                        for i in record.history.item
                    }
                )
    return found


HEADER, BLOCK, CHUNK, WHOLE = 7, 2**15, 7, (1, 4)


def chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = HEADER
    while place < len(data):
        if BLOCK - place % BLOCK < CHUNK:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        yield kind, data[place + CHUNK : place + CHUNK + length]
        place += CHUNK + length


def test_wandb_without_a_run_says_what_to_do() -> None:
    from stepguard.integrations.sinks import WandbSink

    with pytest.warns(
        RuntimeWarning, match=r"WandbSink found no active run: call wandb.init\(\) first"
    ):
        train(WandbSink())

"""Loggers, each a Sink to give to `GuardConfig(sinks=...)`; `Sink` is the base for your own.

A library is imported when its sink is made. Where a backend drops or distorts NaN and Inf, only
finite numbers are sent, and `stepguard/nonfinite` reports the rest.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from importlib import import_module
from os import PathLike, fspath
from typing import Any

from stepguard._errors import ConfigError
from stepguard.records import Incident, Reading
from stepguard.records.codec import to_plain
from stepguard.records.incident import Sink
from stepguard.report.sinks import (
    INCIDENTS,
    NONFINITE,
    PREFIX,
    SKIPPED,
    WebhookFailed,
    WebhookSink,
    finite_only,
    scalars,
)

__all__ = [
    "MlflowSink",
    "OpenTelemetrySink",
    "PrometheusSink",
    "ScalarSink",
    "Sink",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "WebhookFailed",
    "WebhookSink",
]

STEP = PREFIX + "step"


class ScalarSink(Sink):
    """Sends every step, or every few, as named numbers; a bad or skipped one always."""

    library = ""
    """The module behind the sink."""
    extra = ""
    """What `pip install 'stepguard[...]'` calls it."""
    keeps_nonfinite = False
    """Can the backend store NaN and Inf? Otherwise they are dropped, and `nonfinite` says so."""

    def __init__(self, *, every: int = 1) -> None:
        name = type(self).__name__
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"{name}: every={every!r} must be a whole number of at least 1.")
        self.every = every
        self._incidents = 0
        self._held: tuple[int, dict[str, float]] | None = None
        """A step that was not committed: its incident comes after it and is counted with it."""
        self._module: Any = None
        if self.library:
            try:
                self._module = import_module(self.library)
            except ImportError as missing:
                raise ConfigError(
                    f"{name} needs {missing.name or self.library}: pip install "
                    f"'stepguard[{self.extra}]'."
                ) from missing

    def step(self, reading: Reading, committed: bool) -> None:
        self._send_held()
        values = scalars(reading, committed=committed)
        if self.due(reading.step) or values[NONFINITE] or values[SKIPPED]:
            if not self.keeps_nonfinite:
                values = finite_only(values)
            self._held = (reading.step, values)
        if committed:
            self._send_held()

    def incident(self, incident: Incident) -> None:
        self._incidents += 1
        self._send_held()
        self.show(incident)

    def close(self) -> None:
        """Send what is held back. A sink that closes something itself calls this first."""
        self._send_held()

    def _send_held(self) -> None:
        held = self._held
        self._held = None
        if held is not None:
            step, values = held
            self.send({**values, INCIDENTS: float(self._incidents)}, step)

    def due(self, step: int) -> bool:
        """Is a healthy step sent?"""
        return step % self.every == 0

    @abstractmethod
    def send(self, values: dict[str, float], step: int) -> None:
        """Send the numbers of one optimizer step."""

    def show(self, incident: Incident) -> None:
        """Show an incident, in a backend that can show more than numbers."""

    def _active(self, run: Any, start: str, argument: str = "run") -> Any:
        """The run, or a ConfigError that says how to get one."""
        if run is None:
            name = type(self).__name__
            raise ConfigError(
                f"{name} found no active run: call {start} first, or give {name}({argument})."
            )
        return run


class TensorBoardSink(ScalarSink):
    """Writes into `log_dir`, or through a SummaryWriter you have already, which stays open."""

    library, extra = "torch.utils.tensorboard", "tensorboard"
    keeps_nonfinite = True

    def __init__(
        self,
        log_dir: str | PathLike[str] | None = None,
        *,
        writer: Any | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(every=every)
        if (log_dir is None) == (writer is None):
            raise ConfigError(
                "TensorBoardSink: give either log_dir=... or writer=SummaryWriter(...)."
            )
        self._folder = log_dir
        self._open = writer

    @property
    def _writer(self) -> Any:
        if self._open is None:
            self._open = self._module.SummaryWriter(fspath(self._folder or ""))
        return self._open

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def show(self, incident: Incident) -> None:
        self._writer.add_text(f"{PREFIX}incident", incident.summary, incident.step)
        self._writer.flush()

    def close(self) -> None:
        super().close()
        if self._folder is None:
            self._writer.flush()
        elif self._open is not None:
            self._open.close()
            self._open = None


class WandbSink(ScalarSink):
    """Logs to `run`, or to the active `wandb.run`, which is never started or finished here."""

    library = extra = "wandb"

    def __init__(self, run: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._given = run
        self._prepared: Any | None = None

    @property
    def _run(self) -> Any:
        run = self._active(self._given or self._module.run, "wandb.init()")
        if run is not self._prepared:
            # A step axis of its own: `step=` would clash with the steps that wandb counts for the
            # user's own run.log calls.
            run.define_metric(STEP, hidden=True)
            run.define_metric(f"{PREFIX}*", step_metric=STEP)
            self._prepared = run
        return run

    def send(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, STEP: step})

    def show(self, incident: Incident) -> None:
        # Characters of an alert's title
        self._run.alert(title=_title(incident)[:60], text=incident.summary)


class TrackioSink(ScalarSink):
    """Logs to `run`, or to the active run of `trackio.init`, which is never finished here."""

    library, extra = "trackio.context_vars", "trackio"
    keeps_nonfinite = True

    def __init__(self, run: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._given = run

    @property
    def _run(self) -> Any:
        run = self._given or self._module.current_run.get()
        return self._active(run, "trackio.init(project=...)")

    def send(self, values: dict[str, float], step: int) -> None:
        # A value and not `step=`: that would move the step trackio counts for the user's own logs.
        self._run.log({**values, STEP: step})

    def show(self, incident: Incident) -> None:
        self._run.alert(title=_title(incident), text=incident.summary)


def _title(incident: Incident) -> str:
    return f"stepguard: {incident.verdict.kind} at step {incident.step}"


class MlflowSink(ScalarSink):
    """Logs to `run_id`, or to the active run, which is never started or ended here.

    A database store keeps Inf as 1.8e308, so only finite numbers are sent.
    """

    library = extra = "mlflow"

    def __init__(
        self, run_id: str | None = None, *, tracking_uri: str | None = None, every: int = 1
    ) -> None:
        super().__init__(every=every)
        self._given = run_id
        self._client = self._module.MlflowClient(tracking_uri=tracking_uri)

    @property
    def _run_id(self) -> str:
        if self._given is not None:
            return self._given
        active = self._active(self._module.active_run(), "mlflow.start_run()", "id")
        return str(active.info.run_id)

    def send(self, values: dict[str, float], step: int) -> None:
        metric = self._module.entities.Metric
        now = int(time.time() * 1000)
        metrics = [metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def show(self, incident: Incident) -> None:
        self._client.set_tag(self._run_id, f"{PREFIX}last_incident", incident.summary)
        path = f"{PREFIX}incidents/{incident.id}.json"
        self._client.log_dict(self._run_id, to_plain(incident), path)


class GaugeSink(ScalarSink):
    """Sends to gauges that are made on first use, and counts incidents by kind and cause."""

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._gauges: dict[str, Any] = {}

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in {**values, STEP: float(step)}.items():
            # The counter has the incidents.
            if name == INCIDENTS:
                continue
            if name not in self._gauges:
                self._gauges[name] = self.gauge(name)
            self._gauges[name].set(value)

    @abstractmethod
    def gauge(self, name: str) -> Any:
        """Make the gauge of this name."""

    def show(self, incident: Incident) -> None:
        labels = {"kind": incident.verdict.kind, "code": "", "action": ""}
        if incident.findings:
            labels["code"] = incident.findings[0].code
        if incident.decision is not None:
            labels["action"] = incident.decision.action
        self.count(labels)

    @abstractmethod
    def count(self, labels: dict[str, str]) -> None:
        """Count one incident; a label that is not known is empty."""


class PrometheusSink(GaugeSink):
    """Gauges and a counter in `registry`, by default the process's own; you serve them."""

    library, extra = "prometheus_client", "prometheus"
    # Gauges hold NaN and Inf: left out, the last good value would still be shown.
    keeps_nonfinite = True

    def __init__(self, registry: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._registry = registry if registry is not None else self._module.REGISTRY
        self._counter: Any | None = None

    def gauge(self, name: str) -> Any:
        plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        return self._module.Gauge(plain, f"{name} of the last step", registry=self._registry)

    def count(self, labels: dict[str, str]) -> None:
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


class OpenTelemetrySink(GaugeSink):
    """Gauges and a counter of one meter, by default of the process's own `meter_provider`."""

    library, extra = "opentelemetry.metrics", "otel"

    def __init__(self, meter_provider: Any | None = None, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._meter = self._module.get_meter("stepguard", meter_provider=meter_provider)
        self._counter = self._meter.create_counter(
            "stepguard.incidents", description="Bad steps so far"
        )

    def gauge(self, name: str) -> Any:
        return self._meter.create_gauge(re.sub(r"[^a-zA-Z0-9_.]", "_", name.replace("/", ".")))

    def count(self, labels: dict[str, str]) -> None:
        self._counter.add(1, {name: value for name, value in labels.items() if value})

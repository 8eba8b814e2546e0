"""TensorBoard. An event file stores NaN and Inf as they are, and the page marks them."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from stepguard._errors import ConfigError
from stepguard.integrations.sinks.base import ScalarSink, backend
from stepguard.records import Incident
from stepguard.report.sinks import PREFIX


class TensorBoardSink(ScalarSink):
    """Writes into `log_dir`, or through a SummaryWriter you have already, which stays open."""

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
        self._module = backend("torch.utils.tensorboard", "tensorboard", "TensorBoardSink")
        self._folder = log_dir
        self._given = writer
        self._own: Any | None = None

    @property
    def _writer(self) -> Any:
        if self._given is not None:
            return self._given
        if self._own is None:
            assert self._folder is not None
            self._own = self._module.SummaryWriter(fspath(self._folder))
        return self._own

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def tell(self, incident: Incident) -> None:
        self._writer.add_text(f"{PREFIX}incident", incident.summary, incident.step)
        self._writer.flush()

    def close(self) -> None:
        super().close()
        if self._given is not None:
            self._given.flush()
        if self._own is not None:
            self._own.close()
            self._own = None

"""The loggers of a Trainer or a Fabric as a sink, so that both log to the same place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepguard.integrations.sinks.base import ScalarSink
from stepguard.report.scalars import finite_only

KEEP_NONFINITE = ("TensorBoardLogger", "CSVLogger")
"""Loggers whose backend stores NaN and Inf as they are; others get finite numbers only."""


class HostLogger(ScalarSink):
    """Logs where and as often as the framework, which opens and closes the loggers."""

    keeps_nonfinite = True

    def __init__(self, loggers: Sequence[Any], *, every: int = 1) -> None:
        super().__init__(every=every)
        self._loggers = tuple(loggers)

    def due(self, step: int) -> bool:
        # As Lightning counts, so that the numbers of both are in one row.
        return (step + 1) % self.every == 0

    def send(self, values: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            keeps = type(logger).__name__ in KEEP_NONFINITE
            logger.log_metrics(values if keeps else finite_only(values), step=step)

"""Lightning's training step as a loss function that can be run again without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from stepguard.tensors.names import swapped

# Of a torchmetrics.Metric, which is known by its attributes: importing it takes a second.
METRIC_COUNTERS = ("_update_count", "_computed", "_forward_cache")


class TrainingStep:
    """Lightning's `training_step`, from the batch to the loss that backward starts from."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._rest: dict[int, tuple[Any, ...]] = {}
        self._last: tuple[Any, ...] = ()
        self._step = -1

    def about_to_run(self, batch: Any, rest: tuple[Any, ...], step: int) -> None:
        """Remember what `training_step` gets besides the batch: mostly its index."""
        if step != self._step:
            self._rest = {}
            self._step = step
        self._rest[id(batch)] = rest
        self._last = rest

    def __call__(self, batch: Any) -> Tensor:
        """The loss Lightning calls backward on; part of a batch gets the index of the last one."""
        rest = self._rest.get(id(batch), self._last)
        with unnoticed(self._module), self._trainer.precision_plugin.train_step_context():
            output = self._module.training_step(batch, *rest)
        loss = output["loss"] if isinstance(output, Mapping) else output
        assert isinstance(loss, Tensor), "training_step returned no loss"
        return loss.div(self._trainer.accumulate_grad_batches)


@contextmanager
def unnoticed(module: LightningModule) -> Iterator[None]:
    """Log nothing, and let metrics forget what they see."""
    with ExitStack() as undo:
        for part in module.modules():
            if hasattr(part, "_defaults") and hasattr(part, "_update_count"):
                undo.callback(_put_back, part, _state_of(part))
        undo.enter_context(swapped(module, "log", _silent))
        yield


def _silent(*args: Any, **kwargs: Any) -> None:
    """Stands in for `self.log` while a step is run again."""


def _state_of(metric: Any) -> dict[str, Any]:
    kept = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        kept[name] = value.clone() if isinstance(value, Tensor) else copy(value)
    for name in METRIC_COUNTERS:
        kept[name] = getattr(metric, name)
    return kept


def _put_back(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)

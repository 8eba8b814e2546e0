"""Lightning's training step as a loss function that can be run again without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from stepguard.tensors.wrapping import swapped

# of a torchmetrics.Metric, which is told by its attributes: importing it takes a second
METRIC_COUNTERS = ("_update_count", "_computed", "_forward_cache")


class TrainingStep:
    """`training_step` of one micro-batch after the other, from the batch to the loss that backward
    starts from.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._rest: dict[int, tuple[Any, ...]] = {}
        self._last: tuple[Any, ...] = ()
        self._step = -1

    def about_to_run(self, batch: Any, rest: tuple[Any, ...], step: int) -> None:
        """Remember what `training_step` gets besides the batch of this optimizer step: its index,
        mostly.
        """
        if step != self._step:
            self._rest, self._step = {}, step
        self._rest[id(batch)] = self._last = rest

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
    """Nothing is logged, and metrics forget what they see."""
    metrics = [
        m for m in module.modules() if hasattr(m, "_defaults") and hasattr(m, "_update_count")
    ]
    with ExitStack() as undo:
        for metric in metrics:
            undo.callback(_put_back, metric, _state_of(metric))
        undo.enter_context(swapped(module, "log", _silent))
        yield


def _silent(*args: Any, **kwargs: Any) -> None:
    """Stands in for `self.log` while a step is run again."""


def _state_of(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    kept = {
        name: value.clone() if isinstance(value, Tensor) else copy(value)
        for name, value in states.items()
    }
    return kept | {name: getattr(metric, name) for name in METRIC_COUNTERS}


def _put_back(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)

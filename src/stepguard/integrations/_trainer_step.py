"""A Trainer's training step once more, up to its loss: for replays, so without backward and without
a trace on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import StepguardError
from stepguard.tensors.wrapping import swapped

ITEMS = "num_items_in_batch"
DATA = ("train_dataset", "eval_dataset")
LARGE = 10_000
"""Containers with more elements hold data, not metrics."""


class NoBackwardError(StepguardError):
    """The Trainer's training_step never called backward, so that its loss is not known."""


class TrainingStep:
    """The loss that one Trainer is about to call backward on, whatever its class makes of
    `training_step`.
    """

    def __init__(self, trainer: Any, training_step: Callable[..., Any]) -> None:
        self._trainer, self._training_step = trainer, training_step

    def batch(self, inputs: Any, items: Any) -> Any:
        """What `loss` takes: the inputs, and the number of items beside them, which is as much a
        part of the step.
        """
        batch = copy.copy(inputs)
        if items is not None and isinstance(batch, MutableMapping):
            batch[ITEMS] = items
        return batch

    def loss(self, step: int, model: Any, batch: Any) -> Tensor:
        """Everything as at global step `step`, except that backward only notes what it was called
        on.
        """
        accelerator, state = self._trainer.accelerator, self._trainer.state
        roots: list[Tensor] = []

        def note(loss: Tensor, **_: Any) -> None:
            roots.append(loss / accelerator.gradient_accumulation_steps)

        def note_direct(tensors: Any, *_: Any, **__: Any) -> None:
            roots.extend([tensors] if isinstance(tensors, Tensor) else tensors)

        with (
            kept(self._trainer),
            swapped(state, "global_step", step),
            swapped(accelerator, "backward", note),
            swapped(
                torch.autograd, "backward", note_direct
            ),  # a training_step that calls loss.backward() itself
        ):
            inputs = copy.copy(batch)
            items = inputs.pop(ITEMS, None) if isinstance(inputs, MutableMapping) else None
            self._training_step(model, inputs, items)
        if not roots:
            raise NoBackwardError(
                f"{type(self._trainer).__name__}.training_step called no backward."
            )
        return sum(roots[1:], start=roots[0])


@contextmanager
def kept(trainer: Any) -> Iterator[None]:
    """Attributes are put back, and so is what lists and dicts among them hold: trainers gather
    metrics there.
    """
    own = vars(trainer)
    attributes = dict(own)
    inside = [
        found for name, value in own.items() if name not in DATA for found in _contents(value)
    ]
    try:
        yield
    finally:
        own.clear()
        own.update(attributes)
        for container, content in inside:
            _refill(container, content)


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and dict that can be reached through lists and dicts, each with a copy of what it
    holds.
    """
    if not isinstance(value, dict | list) or len(value) > LARGE:
        return
    yield value, copy.copy(value)
    for item in value.values() if isinstance(value, dict) else value:
        yield from _contents(item)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)

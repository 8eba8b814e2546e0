"""Run a Trainer's training step again up to its loss, without backward and without side effects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import StepguardError
from stepguard.tensors.names import swapped

ITEMS = "num_items_in_batch"
DATA = ("train_dataset", "eval_dataset")
LARGE = 10_000
"""Containers with more elements hold data, not metrics."""


class NoBackwardError(StepguardError):
    """The Trainer's training_step never called backward, so that its loss is not known."""


class TrainingStep:
    """The loss that one Trainer is about to call backward on, also of a subclass of Trainer."""

    def __init__(self, trainer: Any, training_step: Callable[..., Any]) -> None:
        self._trainer = trainer
        self._training_step = training_step

    def batch(self, inputs: Any, items: Any) -> Any:
        """What `loss` takes: the inputs together with the number of items."""
        batch = copy.copy(inputs)
        if items is not None and isinstance(batch, MutableMapping):
            batch[ITEMS] = items
        return batch

    def loss(self, step: int, model: Any, batch: Any) -> Tensor:
        """Run training_step as at global step `step`; backward only keeps what it is called on."""
        accelerator = self._trainer.accelerator
        state = self._trainer.state
        roots: list[Tensor] = []

        def keep(loss: Tensor, **_: Any) -> None:
            roots.append(loss / accelerator.gradient_accumulation_steps)

        def keep_direct(tensors: Any, *_: Any, **__: Any) -> None:
            roots.extend([tensors] if isinstance(tensors, Tensor) else tensors)

        with (
            kept(self._trainer),
            swapped(state, "global_step", step),
            swapped(accelerator, "backward", keep),
            # A training_step of the user's may call loss.backward() itself.
            swapped(torch.autograd, "backward", keep_direct),
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
    """Put attributes back, and the content of lists and dicts: trainers keep metrics there."""
    own = vars(trainer)
    attributes = dict(own)
    inside: list[tuple[Any, Any]] = []
    for name, value in own.items():
        if name not in DATA:
            inside.extend(_contents(value))
    try:
        yield
    finally:
        own.clear()
        own.update(attributes)
        for container, content in inside:
            _refill(container, content)


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and dict that is reached through lists and dicts, each with a shallow copy."""
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

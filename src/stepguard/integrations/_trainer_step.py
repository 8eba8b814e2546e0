"""A Trainer's training step once more, up to its loss: for replays, so without backward and without a trace on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import StepguardError
from stepguard.integrations._wrapping import swapped


class NoBackwardError(StepguardError):
    """The Trainer's training_step never called backward, so that its loss is not known."""


class TrainingStep:
    """The loss that one Trainer is about to call backward on, whatever its class makes of `training_step`."""

    def __init__(self, trainer: Any, training_step: Callable[..., Any]) -> None:
        self._trainer, self._training_step = trainer, training_step

    def loss(self, step: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Tensor:
        """Everything as at global step `step`, except that backward only notes what it was called on."""
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
            swapped(torch.autograd, "backward", note_direct),  # a training_step that calls loss.backward() itself
        ):
            self._training_step(model, copy.copy(batch), *args, **kwargs)
        if not roots:
            raise NoBackwardError(f"{type(self._trainer).__name__}.training_step called no backward.")
        return sum(roots[1:], start=roots[0])


@contextmanager
def kept(trainer: Any) -> Iterator[None]:
    """Attributes are put back, and the numbers inside lists and dicts, where trainers gather metrics, are too."""
    own = vars(trainer)
    attributes = dict(own)
    inside = {name: _copied(value) for name, value in own.items() if isinstance(value, dict | list)}
    try:
        yield
    finally:
        for name in [name for name in own if name not in attributes]:
            del own[name]
        own.update(attributes)
        for name, content in inside.items():
            _put_back(own[name], content)


def _copied(value: Any) -> Any:
    """Containers copied as deep as they go, everything else by reference."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _put_back(container: Any, content: Any) -> None:
    """Into the same object, since others hold on to it."""
    if isinstance(container, list):
        if len(container) != len(content):
            container[:] = content
        for here, there in zip(container, content, strict=True):
            if isinstance(here, dict | list):
                _put_back(here, there)
    elif isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, there in content.items():
            here = container.setdefault(key, there)
            if isinstance(here, dict | list):
                _put_back(here, there)
            else:
                container[key] = there

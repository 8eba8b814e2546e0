"""What a watched model was called with, and the gradient its output got: enough to run the model's part again.

Two hooks sit on the root module only. A copy or pickle of the model carries a harmless function of the standard
library in their place, and while torch compiles or exports they do nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stepguard.state.rng import RngState, capture_rng
from stepguard.state.step import unwrapped

MOST_CALLS = 64
"""Forward calls of one step that are remembered; a loop that calls the model more often is not run again."""


OUTPUT_GRADIENT = "output gradient"
"""Key beside the arguments in the batch that stands for one call."""


@dataclass(slots=True)
class ModelCall:
    """One call of the root module during the step."""

    arguments: dict[str, Any]
    """By name; positional ones take the names of the forward's parameters."""
    positional: int
    rng: RngState
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradient of each differentiable output, by its position."""

    def as_batch(self) -> dict[str, Any]:
        """What a replay takes in the place of the user's batch."""
        return {**self.arguments, OUTPUT_GRADIENT: dict(self.gradients)}


class Ear:
    """A hook that turns into nothing when the module it sits on is copied or pickled."""

    def __init__(self, hear: Callable[..., None]) -> None:
        self._hear = hear

    def __call__(self, *seen: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._hear(*seen)

    def __deepcopy__(self, memo: Any) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class Capture:
    """Remembers the calls of one model since the last update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.calls: list[ModelCall] = []
        self._handles = [
            model.register_forward_pre_hook(Ear(self._called), with_kwargs=True),
            model.register_forward_hook(Ear(self._returned)),
        ]

    def clear(self) -> None:
        self.calls = []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def loss_fn(self, batch: dict[str, Any]) -> Tensor:
        """The model's part of the step as a scalar: its backward gives the output the gradient it had."""
        arguments = {name: value for name, value in batch.items() if name != OUTPUT_GRADIENT}
        names, positional = list(arguments), self.calls[0].positional if self.calls else 0
        args = [arguments[name] for name in names[:positional]]
        outputs = differentiable(self._model(*args, **{name: arguments[name] for name in names[positional:]}))
        gradients = batch[OUTPUT_GRADIENT]
        parts = [_weighted(outputs[i], g) for i, g in gradients.items() if i < len(outputs)]
        return torch.stack(parts or [output.sum() for output in outputs]).sum()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if len(self.calls) < MOST_CALLS and module.training:
            names = argument_names(module, len(args))
            arguments = {**dict(zip(names, args, strict=True)), **kwargs}
            self.calls.append(ModelCall(arguments, len(args), capture_rng()))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.calls or not module.training:
            return
        gradients = self.calls[-1].gradients
        for index, tensor in enumerate(differentiable(output)):
            tensor.register_hook(partial(gradients.__setitem__, index))  # type: ignore[no-untyped-call]


def differentiable(output: Any) -> list[Tensor]:
    """Every tensor of a model's output that gradients flow into."""
    leaves, _ = tree_flatten(dict(output) if hasattr(output, "keys") else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _weighted(output: Tensor, gradient: Tensor) -> Tensor:
    return (output * gradient.to(output)).sum()


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Names of the first positional arguments of the model's forward."""
    try:
        parameters = inspect.signature(unwrapped(model).forward).parameters
    except (TypeError, ValueError):
        return [str(i) for i in range(count)]
    names = [name for name, p in parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return (names + [str(i) for i in range(len(names), count)])[:count]

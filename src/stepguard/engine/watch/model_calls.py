"""What a watched model was called with, and the gradient its output got: enough to run the model's
part again.

No hook is put on the module (engine/watch/call_listener.py). While torch compiles, exports, traces
or transforms a function, nothing is remembered.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepguard.engine.protect import Protection
from stepguard.engine.watch.call_listener import hear_again, hear_calls
from stepguard.locate.source import Line, user_line
from stepguard.state.batch import OUTPUT_GRADIENT
from stepguard.state.rng import RngState, capture_rng
from stepguard.state.step import ModelFn, unwrapped
from stepguard.tensors.torch_private import tracing, transforming, tree_flatten

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_CALLS = 64
"""Forward calls of one step that are remembered; a loop that calls the model more often is not run
again.
"""

Told = Callable[[dict[str, Any]], None]
Failed = Callable[[BaseException, Callable[[Any], object] | None], None]


@dataclass(slots=True)
class OutputGradients:
    """Gradient of each differentiable output, by its position: held, not copied, which costs a step
    nothing.
    """

    held: dict[int, Tensor] = field(default_factory=dict)
    _marks: dict[int, int] = field(default_factory=dict)

    def keep(self, index: int, gradient: Tensor) -> None:
        self.held[index] = gradient
        self._marks[index] = gradient._version

    @property
    def intact(self) -> bool:
        """Has the rest of the backward left them as they came?"""
        return all(gradient._version == self._marks[index] for index, gradient in self.held.items())


@dataclass(slots=True)
class ModelCall:
    """One call of the root module during the step."""

    arguments: dict[str, Any]
    """By name; positional ones take the names of the forward's parameters."""
    positional: int
    rng: RngState
    line: Line | None = None
    """The user's line that called the model."""
    gradients: OutputGradients = field(default_factory=OutputGradients)

    def as_batch(self) -> dict[str, Any]:
        """What a replay takes in the place of the user's batch."""
        return {**self.arguments, OUTPUT_GRADIENT: dict(self.gradients.held)}


class ModelCalls:
    """Remembers the calls of one model since the last update."""

    def __init__(
        self, model: nn.Module, protect: Protection, on_call: Told, on_error: Failed
    ) -> None:
        self._model = model
        self._protect = protect
        self._on_call = on_call
        self._on_error = on_error
        self._paused = False
        self.off = False
        """A framework tells the micro-batches, so the whole step can be run again and calls need
        not be remembered.
        """
        self.calls: list[ModelCall] = []
        self._stop = hear_calls(model, self)

    def clear(self) -> None:
        """A step is over."""
        self.calls = []
        self._stop = hear_again(self._model, self, self._stop)

    def close(self) -> None:
        self._stop()

    def model_fn(self) -> ModelFn | None:
        """Runs the model on one of the calls so far; None where it cannot be run as it was."""
        if not self.calls or len(self.calls) >= MOST_CALLS:
            return None
        positional = self.calls[0].positional
        for call in self.calls:
            if call.positional != positional or not call.gradients.intact:
                return None
        return partial(self._run, positional)

    def _run(
        self, positional: int, batch: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        arguments = {name: value for name, value in batch.items() if name != OUTPUT_GRADIENT}
        args = [arguments.pop(name) for name in list(arguments)[:positional]]
        with self.pausing():
            outputs = differentiable(self._model(*args, **arguments))
        gradients = batch[OUTPUT_GRADIENT]
        return outputs, [gradients.get(i) for i in range(len(outputs))]

    def _attempt(self) -> Callable[[Any], object] | None:
        """The call that is under way again, on other arguments."""
        if not self.calls or self.off:
            return None
        return partial(self._run, self.calls[-1].positional)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Calls in here are the guard's own."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is about to run."""
        if self._hears(module):
            with self._protect.region:
                self._called(module, args, kwargs)

    def raised(self, module: nn.Module, error: Exception) -> None:
        """The model has raised instead."""
        if self._paused or not module.training:
            return
        if torch.is_grad_enabled() and not _being_transformed():
            self._on_error(error, self._attempt())

    def returned(self, module: nn.Module, output: Any) -> None:
        """The model has run."""
        if self.calls and self._hears(module):
            with self._protect.region:
                self._returned(output)

    def _hears(self, module: nn.Module) -> bool:
        if self._paused or self.off or not module.training or not self._protect.armed:
            return False
        return torch.is_grad_enabled() and not _being_transformed()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        names = argument_names(module, len(args))
        arguments = {**dict(zip(names, args, strict=True)), **kwargs}
        self._on_call(arguments)
        if len(self.calls) < MOST_CALLS:
            self.calls.append(ModelCall(arguments, len(args), capture_rng(), user_line()))

    def _returned(self, output: Any) -> None:
        for index, tensor in enumerate(differentiable(output)):
            hook = partial(_received, weakref.ref(self), self.calls[-1].gradients, index)
            hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving the output does not warn
            with suppress(RuntimeError):
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def keep(self, gradients: OutputGradients, index: int, gradient: Tensor) -> None:
        if self._protect.armed:
            with self._protect.region:
                gradients.keep(index, gradient)


def _received(
    capture: weakref.ref[ModelCalls], gradients: OutputGradients, index: int, gradient: Tensor
) -> None:
    """Weak: whoever keeps a loss keeps its graph, and with it this hook, in C++ where no collector
    looks.
    """
    if (listening := capture()) is not None:
        listening.keep(gradients, index, gradient)


def _being_transformed() -> bool:
    """Compiled, exported, traced or under torch.func: there are no real tensors to remember."""
    if torch.compiler.is_compiling() or tracing():
        return True
    return transforming()


def differentiable(output: Any) -> list[Tensor]:
    """Every tensor of a model's output that gradients flow into."""
    leaves, _ = tree_flatten(dict(output) if hasattr(output, "keys") else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Names of the first positional arguments of the model's forward."""
    try:
        parameters = inspect.signature(unwrapped(model).forward).parameters
    except (TypeError, ValueError):
        return [str(i) for i in range(count)]
    names = [name for name, p in parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return (names + [str(i) for i in range(len(names), count)])[:count]

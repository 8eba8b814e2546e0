"""What a watched model was called with, and the gradient its output got: enough to run the model's part again.

Two hooks sit on the root module only. A copy or pickle of the model carries a harmless function of the standard
library in their place, and while torch compiles, exports, traces or transforms a function they do nothing.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stepguard.engine.shield import Shield
from stepguard.locate.source import Line, user_line
from stepguard.state.batch import OUTPUT_GRADIENT
from stepguard.state.rng import RngState, capture_rng
from stepguard.state.step import ModelFn, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_CALLS = 64
"""Forward calls of one step that are remembered; a loop that calls the model more often is not run again."""

Told = Callable[[dict[str, Any]], None]
Failed = Callable[[BaseException, Callable[[Any], object] | None], None]


@dataclass(slots=True)
class OutputGradients:
    """Gradient of each differentiable output, by its position: held, not copied, which costs a step nothing."""

    held: dict[int, Tensor] = field(default_factory=dict)
    _marks: dict[int, int] = field(default_factory=dict)

    def keep(self, index: int, gradient: Tensor) -> None:
        self.held[index], self._marks[index] = gradient, gradient._version

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


class Ear:
    """A hook that turns into nothing when the module it sits on is copied or pickled."""

    def __init__(self, hear: Callable[..., None]) -> None:
        self._hear = hear

    def __call__(self, *seen: Any) -> None:
        if torch.is_grad_enabled() and not _being_transformed():
            self._hear(*seen)

    def __deepcopy__(self, memo: Any) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class Capture:
    """Remembers the calls of one model since the last update."""

    def __init__(self, model: nn.Module, shield: Shield, on_call: Told, on_error: Failed) -> None:
        self._model, self._shield = model, shield
        self._on_call, self._on_error = on_call, on_error
        self._deaf = False
        self.off = False
        """A framework tells the micro-batches, so the whole step can be run again and calls need not be remembered."""
        self.calls: list[ModelCall] = []
        self._undo = ExitStack()
        compiled: Any = getattr(model, "_compiled_call_impl", None)
        if compiled is not None:
            self._wrap_compiled(compiled)
        else:
            self._undo.callback(model.register_forward_pre_hook(Ear(self._heard_call), with_kwargs=True).remove)
            self._undo.callback(model.register_forward_hook(Ear(self._heard_return), always_call=True).remove)

    def clear(self) -> None:
        self.calls = []

    def close(self) -> None:
        self._undo.close()

    def _wrap_compiled(self, compiled: Callable[..., Any]) -> None:
        """After `model.compile()` hooks would be compiled too, and hear nothing. Copies never carry this attribute."""
        model: Any = self._model
        call, answer = Ear(self._heard_call), Ear(self._heard_return)

        def heard(*args: Any, **kwargs: Any) -> Any:
            call(model, args, kwargs)
            output = compiled(*args, **kwargs)
            answer(model, args, output)
            return output

        model._compiled_call_impl = heard
        self._undo.callback(setattr, model, "_compiled_call_impl", compiled)

    def model_fn(self) -> ModelFn | None:
        """Runs the model on one of the calls so far; None where it cannot be run as it was."""
        counts = {call.positional for call in self.calls}
        known = len(counts) == 1 and len(self.calls) < MOST_CALLS and all(call.gradients.intact for call in self.calls)
        return partial(self._run, counts.pop()) if known else None

    def _run(self, positional: int, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
        arguments = {name: value for name, value in batch.items() if name != OUTPUT_GRADIENT}
        args = [arguments.pop(name) for name in list(arguments)[:positional]]
        with self._not_listening():
            outputs = differentiable(self._model(*args, **arguments))
        gradients = batch[OUTPUT_GRADIENT]
        return outputs, [gradients.get(i) for i in range(len(outputs))]

    def _attempt(self) -> Callable[[Any], object] | None:
        """The call that is under way again, on other arguments."""
        return partial(self._run, self.calls[-1].positional) if self.calls and not self.off else None

    @contextmanager
    def _not_listening(self) -> Iterator[None]:
        before, self._deaf = self._deaf, True
        try:
            yield
        finally:
            self._deaf = before

    def _heard_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and not (self._deaf or self.off):
            self._shield.call(None, self._called, module, args, kwargs)

    def _heard_return(self, module: nn.Module, args: Any, output: Any) -> None:
        error = _raised_by(module) if output is None else None
        if error is not None and module.training and not self._deaf:
            self._on_error(error, self._attempt())
        elif module.training and not (self._deaf or self.off) and self.calls:
            self._shield.call(None, self._returned, output)

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
        self._shield.call(None, gradients.keep, index, gradient)


def _raised_by(module: nn.Module) -> BaseException | None:
    """The exception that is leaving this module; torch calls the hook with no output then."""
    error = sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_call_impl" and trace.tb_frame.f_locals.get("self") is module:
            return error
        trace = trace.tb_next
    return None


def _received(capture: weakref.ref[Capture], gradients: OutputGradients, index: int, gradient: Tensor) -> None:
    """Weak: whoever keeps a loss keeps its graph, and with it this hook, in C++ where no collector looks."""
    if (listening := capture()) is not None:
        listening.keep(gradients, index, gradient)


def _being_transformed() -> bool:
    """Compiled, exported, traced or under torch.func: there are no real tensors to remember."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


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

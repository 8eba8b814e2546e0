"""What a watched model was called with, and the gradient its output got: enough to run the model's
part again.

No hook is put on the module (engine/watch/call_listener.py). While torch compiles, exports, traces
or transforms a function, nothing is remembered.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stepguard.engine.context import StepProbe
from stepguard.engine.protect import Protection
from stepguard.locate.source import Line, user_line
from stepguard.state.batch import OUTPUT_GRADIENT, LossFn, ModelFn, Step, unwrapped
from stepguard.state.rng import RngState, capture_rng
from stepguard.tensors.torch_private import (
    COMPILED_CALL,
    graphs_compiled,
    tracing_state,
    transforms,
    tree_flatten,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
from collections.abc import Iterable

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from stepguard.tensors.values import VERSION

# --- Hearing the calls of a module without a hook on it.


class Hearer(Protocol):
    """Receives every call of one module, and the output of those that `called` says it wants."""

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> bool: ...
    def returned(self, output: Any) -> None: ...
    def raised(self, module: nn.Module, error: Exception) -> None: ...


class HeardCall:
    """Stands where torch looks for a compiled forward, and runs what would have run without it."""

    def __init__(self, module: Any, below: Callable[..., Any] | None) -> None:
        self._module = module
        self.below = below
        """What `module.compile()` had put there."""
        self.hearers: list[Hearer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._module._call_impl(*args, **kwargs)
        # A twin with the same attributes (a replica of DataParallel) must run itself.
        module = self._module
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, nn.Module) and vars(caller).get(COMPILED_CALL) is self:
            module = caller
        run = module._call_impl if self.below is None else self.below
        if module is not self._module:
            return run(*args, **kwargs)
        waiting = []
        for hearer in tuple(self.hearers):
            if hearer.called(module, args, kwargs):
                waiting.append(hearer)
        try:
            output = run(*args, **kwargs)
        except Exception as error:
            for hearer in tuple(self.hearers):
                hearer.raised(module, error)
            raise
        for hearer in waiting:
            hearer.returned(output)
        return output

    def __deepcopy__(self, memo: Any) -> Any:
        return None

    def __reduce__(self) -> Any:
        """For classes with a `__getstate__` of their own that does not leave this attribute out."""
        return type(None), ()


def hear_calls(module: nn.Module, hearer: Hearer) -> Callable[[], None]:
    """Start telling `hearer`; returns the call that stops it. Several may listen to one module."""
    heard = vars(module).get(COMPILED_CALL)
    if not isinstance(heard, HeardCall):
        heard = HeardCall(module, heard)
        vars(module)[COMPILED_CALL] = heard
    heard.hearers.append(hearer)
    return partial(_stop, module, heard, hearer)


def _stop(module: nn.Module, heard: HeardCall, hearer: Hearer) -> None:
    if hearer in heard.hearers:
        heard.hearers.remove(hearer)
    if heard.hearers or vars(module).get(COMPILED_CALL) is not heard:
        return  # others listen, or `module.compile()` has replaced it since
    if heard.below is None:
        del vars(module)[COMPILED_CALL]
    else:
        vars(module)[COMPILED_CALL] = heard.below


# --- What a loop that makes its own steps tells the guard: the micro-batches, and how to compute
# each loss. A framework tells them before it runs them, a user's loop by `guard.loss`.


LOSS_SCALING = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0"})
"""Autograd nodes that a loop may put between a loss and its backward: a factor, another dtype."""


class MicroBatches:
    """Remembers the micro-batches since the last update."""

    def __init__(self, deaf: Callable[[], AbstractContextManager[None]]) -> None:
        self._deaf = deaf
        self._loss_fn: LossFn | None = None
        self._kept: list[tuple[Any, RngState]] = []
        self._handed_out: list[Any] = []
        """Autograd nodes of the losses that `guard.loss` has returned since the last update."""
        self._incomplete = False
        """Backward was called on more than these losses: a replay would leave something out."""

    def add(self, loss_fn: LossFn, batch: Any) -> None:
        """Forward and backward of `batch` come next; random numbers are those of now."""
        self._loss_fn = loss_fn
        self._kept.append((batch, capture_rng()))

    @property
    def first(self) -> bool:
        """Has nothing of the step been reported yet?"""
        return not self._kept

    def hand_out(self, loss: Tensor) -> None:
        """The loop gets this loss, and is to call backward on it."""
        self._handed_out.append(loss.grad_fn)

    def heard(self, root: Tensor) -> None:
        """Backward starts at `root`: is it a loss that was handed out, up to a factor?"""
        if self._handed_out and not _leads_to(root.grad_fn, self._handed_out):
            self._incomplete = True

    def clear(self) -> None:
        self._kept = []
        self._handed_out = []
        self._incomplete = False

    def complete(self, step: Step, backwards: int) -> bool:
        """Make `step` whole, if every backward that was heard has its micro-batch. False leaves it
        as it is.

        Earlier ones belong to gradients that the loop has dropped since.
        """
        if self._loss_fn is None or not self._kept or len(self._kept) < backwards:
            return False
        if self._incomplete:
            return False
        kept = self._kept
        if backwards:
            kept = kept[-backwards:]
        step.loss_fn = self._unheard(self._loss_fn)
        step.micro_batches = tuple(batch for batch, _ in kept)
        step.rng = [rng for _, rng in kept]
        return True

    def _unheard(self, loss_fn: LossFn) -> LossFn:
        """In a replay the guard must not take what it receives for the next step."""

        def again(batch: Any) -> Tensor | Mapping[str, Tensor]:
            with self._deaf():
                return loss_fn(batch)

        return again


def _leads_to(node: Any, wanted: list[Any]) -> bool:
    """Is nothing but a factor between this node and one of `wanted`?"""
    while node is not None:
        if any(node is one for one in wanted):
            return True
        inputs = [source for source, _ in node.next_functions if source is not None]
        if node.name() not in LOSS_SCALING or len(inputs) != 1:
            return False
        node = inputs[0]
    return False


# --- What a watched model was called with, and the gradient its output got: enough to run the
# model's part again.


CALLER = 4
"""Frames from `user_line` out to the caller of the model: our two, and torch's."""
MOST_CALLS = 64
"""Forward calls of one step that are remembered; a loop that calls the model more often is not run
again.
"""

Told = Callable[[dict[str, Any]], None]
Failed = Callable[[BaseException], None]


@dataclass(slots=True)
class OutputGradients:
    """Gradient of each differentiable output, by its position: held, not copied, which costs a step
    nothing.
    """

    held: dict[int, Tensor] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)

    @property
    def intact(self) -> bool:
        """Has the rest of the backward left them as they came?"""
        return list(map(VERSION, self.held.values())) == list(self.marks.values())


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
        self,
        model: nn.Module,
        protect: Protection,
        on_call: Told,
        on_error: Failed,
        probe: StepProbe,
    ) -> None:
        self._model = model
        self._protect = protect
        self._on_call = on_call
        self._on_error = on_error
        self._probe = probe
        self._evaluates = False
        """The call at hand has no gradients, and its output is for the probe."""
        self._paused = False
        self.off = False
        """A framework reports the micro-batches, so the whole step can be run again and calls need
        not be remembered.
        """
        self.calls: list[ModelCall] = []
        self.outputs: set[int] = set()
        """Sequence numbers of the autograd nodes that made the outputs of these calls."""
        self._names: tuple[Any, int, list[str]] = (None, 0, [])
        """The forward that was called last, the number of its positional arguments, their names."""
        self._reference = weakref.ref(self)
        self._stop = hear_calls(model, self)

    def clear(self) -> None:
        """A step is over."""
        self.calls = []
        self.outputs = set()
        if not isinstance(vars(self._model).get(COMPILED_CALL), HeardCall):
            # `module.compile()` has replaced the call since: attach again around it
            self._stop()
            self._stop = hear_calls(self._model, self)

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

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Calls in here are the guard's own."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """The model is about to run. True where its output is wanted."""
        if self._paused or not module.training or not self._protect.armed:
            return False
        self._evaluates = not torch.is_grad_enabled() and self._probe.evaluates(module)
        if self._evaluates or self.off:
            return self._evaluates
        if not torch.is_grad_enabled() or tracing_state() is not None or transforms() is not None:
            return False
        try:
            forward = unwrapped(module).forward
            forward = getattr(forward, "__func__", forward)
            if self._names[0] is not forward or self._names[1] != len(args):
                self._names = (forward, len(args), argument_names(module, len(args)))
            arguments = dict(zip(self._names[2], args, strict=True))
            arguments.update(kwargs)
            self._on_call(arguments)
            if len(self.calls) < MOST_CALLS:
                line = user_line(CALLER)
                self.calls.append(ModelCall(arguments, len(args), capture_rng(), line))
        except Exception as fault:
            self._protect.failed(fault)
        return bool(self.calls)

    def raised(self, module: nn.Module, error: Exception) -> None:
        """The model has raised instead."""
        if self._paused or not module.training or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling() or tracing_state() is not None:
            return
        if transforms() is None:
            self._on_error(error)

    def returned(self, output: Any) -> None:
        """The model has run."""
        if self._evaluates:
            self._probe.evaluated(output)
        if self._evaluates or not self.calls:
            return
        try:
            for index, tensor in enumerate(differentiable(output)):
                if tensor.grad_fn is not None:
                    self.outputs.add(tensor.grad_fn._sequence_nr())
                hook = partial(_received, self._reference, self.calls[-1].gradients, index)
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving the output does not warn
                try:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                except RuntimeError:
                    continue  # a tensor that takes no hook
        except Exception as fault:
            self._protect.failed(fault)


def _received(
    capture: weakref.ref[ModelCalls], gradients: OutputGradients, index: int, gradient: Tensor
) -> None:
    """Weak: code that keeps a loss keeps its graph, and with it this hook, in C++, where no
    collector finds it.
    """
    if capture() is not None:
        gradients.held[index] = gradient
        gradients.marks[index] = gradient._version


def differentiable(output: Any) -> list[Tensor]:
    """Every tensor of a model's output that gradients flow into."""
    if type(output) is Tensor:
        return [output] if output.requires_grad else []
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


# --- The moment between two steps: the last update is over, and nothing of the next forward pass
# has run.


class StepBoundary:
    """Calls `cross` once after every `open`."""

    def __init__(self, roots: Iterable[nn.Module], cross: Callable[[], None]) -> None:
        self._roots = tuple(roots)
        self._cross = cross
        self._open = True
        self._root_calls = True
        self._doubted = False
        self._parts: set[int] = set()
        self._handle: RemovableHandle | None = None

    def open(self) -> bool:
        """An update is over. Does the root itself begin every step?"""
        if self._open:
            self._root_calls = False  # a whole step went by without a call
        self._open = True
        reliable = self._root_calls and not self._doubted
        if not reliable and not graphs_compiled():
            self._parts = {id(module) for root in self._roots for module in root.modules()}
            self._handle = self._handle or register_module_forward_pre_hook(self._called)
        return reliable

    def root_called(self) -> None:
        """The model, or the framework that is about to call it."""
        if self._open:
            self._root_calls = True
            self._pass()

    def doubt(self) -> None:
        """A part of the model was seen to run before its root."""
        self._doubted = True

    def close(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, module: nn.Module, args: Any) -> None:
        if self._open and id(module) in self._parts and torch.is_grad_enabled():
            self._pass()

    def _pass(self) -> None:
        self._open = False
        if self._handle is not None:
            self.close()
        self._cross()

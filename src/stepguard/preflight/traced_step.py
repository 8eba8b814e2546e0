"""Trace one forward and backward pass of the real step, leaving every object as it was."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from stepguard.diagnose.ops import words
from stepguard.preflight.answers import one_line
from stepguard.preflight.framework import FrameworkFacts
from stepguard.preflight.subject import Subject
from stepguard.state.batch import named_tensors
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.step import Step, total_loss, unwrapped
from stepguard.tensors.dtypes import dtype_name
from stepguard.tensors.torch_private import TorchDispatchMode, compiled_call, tree_map_only
from stepguard.tensors.values import dense_values, is_finite
from stepguard.tensors.versions import versions, written_since

MATMULS = words(
    """
    mm addmm bmm baddbmm addbmm matmul linear convolution _convolution mkldnn_convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _mkldnn_linear
    """
)
"""The operations autocast is for: their dtype is the effective precision."""
DIVISIONS = frozenset({"div", "div_", "true_divide", "reciprocal"})
CROSS_ENTROPIES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss_nd"})
DELICATE = words("exp log logsumexp _softmax _log_softmax sqrt rsqrt pow cdist_forward")
"""Operations worth naming, because many incidents begin in one."""
LARGEST_EPS = 1e-3
"""A larger number that is added is not an eps."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """The smallest magnitude something was divided by, and where."""

    least: float
    dtype: str
    source: str


@dataclass(slots=True)
class TracedStep:
    """What one pass showed."""

    loss: float | None = None
    outputs_bad: list[str] = field(default_factory=list)
    grads_bad: list[str] = field(default_factory=list)
    grad_norm: float | None = None
    dtypes: Counter[str] = field(default_factory=Counter)
    """Output dtype of every matrix product and convolution of the forward pass."""
    ops: Counter[str] = field(default_factory=Counter)
    divisions: int = 0
    divisor: Divisor | None = None
    lost_eps: dict[str, str] = field(default_factory=dict)
    """Small numbers that were added without effect: `loss.py:12` -> `1e-08 in float32`."""
    classes: int | None = None
    """Number of classes of the cross-entropy, if there is one."""
    latent: tuple[float, float] | None = None
    """Mean and standard deviation of the target of a squared error; of several, of the one whose
    deviation is farthest from 1."""
    fault: str = ""
    """The program's own exception."""


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes notes of the forward pass only: the backward repeats its dtypes."""

    def __init__(self, step: TracedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step
        self._difference: tuple[Any, Any] = (None, None)
        """The last difference of a prediction and a target, and that target."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in DELICATE:
            self._step.ops[name.strip("_")] += 1
        if name in MATMULS:
            self._multiplied(out)
        elif name in DIVISIONS:
            self._divided(args[0] if name == "reciprocal" else args[1])
        elif name == "add" and len(args) > 1:
            self._added(args[0], args[1], out)
        elif name in CROSS_ENTROPIES:
            self._classified(args[0])
        elif name == "mse_loss":
            self._compared(args[1])
        elif name in ("sub", "pow", "square"):
            self._squared_error(name, args, out)
        return out

    def _squared_error(self, name: str, args: Any, out: Any) -> None:
        """A mean squared error written by hand: a difference, then its square."""
        if name == "sub":
            wanted = [one for one in args[:2] if isinstance(one, Tensor) and not one.requires_grad]
            self._difference = (out, wanted[0]) if len(wanted) == 1 else (None, None)
        elif args[0] is self._difference[0] and args[1:] in ((), (2,)):
            self._compared(self._difference[1])

    def _multiplied(self, out: Any) -> None:
        # Attention returns its output first, and what its backward needs.
        if isinstance(out, tuple):
            out = out[0]
        if isinstance(out, Tensor):
            self._step.dtypes[dtype_name(out.dtype)] += 1

    def _divided(self, divisor: Any) -> None:
        least, dtype = _least(divisor)
        if least is None:
            return
        self._step.divisions += 1
        if self._step.divisor is None or least < self._step.divisor.least:
            self._step.divisor = Divisor(least, dtype, _user_line())

    def _added(self, value: Any, eps: Any, out: Any) -> None:
        """Note an eps that is below the spacing of what it is added to."""
        if not isinstance(eps, float) or not 0 < abs(eps) <= LARGEST_EPS:
            return
        if isinstance(value, Tensor) and value.is_floating_point() and torch.equal(value, out):
            self._step.lost_eps[_user_line()] = f"{eps:g} in {dtype_name(value.dtype)}"

    def _classified(self, scores: Tensor) -> None:
        # Classes are the second dimension, behind the batch, if there is a batch.
        if scores.dim() == 1:
            self._step.classes = int(scores.shape[0])
        elif scores.dim() > 1:
            self._step.classes = int(scores.shape[1])

    def _compared(self, target: Tensor) -> None:
        if target.numel() > 1:
            values = target.detach().float()
            found, known = (float(values.mean()), float(values.std())), self._step.latent
            if known is None or _off(found[1]) > _off(known[1]):
                self._step.latent = found


def _off(deviation: float) -> float:
    """How far it is from 1, up or down."""
    return abs(math.log(max(deviation, 1e-30)))


def _least(divisor: Any) -> tuple[float | None, str]:
    if isinstance(divisor, int | float):
        return abs(float(divisor)), "a Python number"
    if not isinstance(divisor, Tensor) or not divisor.numel():
        return None, ""
    if divisor.is_complex() or divisor.dtype == torch.bool:
        return None, ""
    return float(divisor.detach().abs().min()), dtype_name(divisor.dtype)


def _user_line() -> str:
    """`loss.py:12`: the innermost frame that belongs to the user's program."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "stepguard", "contextlib"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def trace_step(subject: Subject, framework: FrameworkFacts, batch: Any) -> TracedStep:
    """Run forward in the real context, and backward. The program's exceptions become `fault`."""
    model = subject.model
    assert model is not None
    step = TracedStep()
    # A step may write into its batch.
    copied = tree_map_only(Tensor, _copied, batch)
    with left_alone(model, subject.optimizer), _eagerly(model):
        try:
            with framework.opened(), _Tracer(step):
                if subject.loss_fn is not None:
                    output = subject.loss_fn(copied)
                else:
                    output = call_model(model, copied)
            loss: Any
            if subject.loss_fn is not None:
                loss = total_loss(output)
            else:
                loss = getattr(output, "loss", None)
                step.outputs_bad = nonfinite_outputs(output)
            if isinstance(loss, Tensor):
                step.loss = float(loss.detach())
                _backward(step, model, loss)
        except Exception as fault:
            step.fault = one_line(fault, 160)
    return step


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Run a compiled model as it was written: compiled code runs no dispatch mode."""
    eager: AbstractContextManager[Any] = nullcontext()
    for module in model.modules():
        if "_orig_mod" in module._modules or compiled_call(module) is not None:
            eager = torch.compiler.set_stance("force_eager")
    return eager


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch as it comes: keywords, positions, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@contextmanager
def left_alone(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Put parameters, gradients, buffers, modes, hooks and generators back, bit for bit."""
    parameters = list(model.parameters())
    copies = {id(parameter): parameter.detach().clone() for parameter in parameters}
    marks = versions(parameters)
    keeper = BufferKeeper([unwrapped(model)])
    keeper.remember()
    if optimizer is None:
        # `untouched` wants an optimizer, and torch makes none without a parameter.
        optimizer = SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.0)
    step = Step(index=0, model=model, optimizer=optimizer, modules={}, buffers=keeper)
    try:
        with untouched(step):
            yield
    finally:
        with torch.no_grad():
            # A forward pass may write to its own weights, for instance clamp them.
            for parameter in written_since(parameters, marks):
                parameter.copy_(copies[id(parameter)])


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def nonfinite_outputs(output: Any) -> list[str]:
    """Names of the tensors in the output of a module that hold a NaN or an Inf."""
    bad = []
    for name, tensor in named_tensors(output):
        if tensor.is_floating_point() and not is_finite(tensor):
            bad.append(name or "output")
    return bad


def _backward(step: TracedStep, model: nn.Module, loss: Tensor) -> None:
    if not loss.requires_grad:
        step.grad_norm = 0.0
        return
    loss.backward()  # type: ignore[no-untyped-call]
    squares = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        # The gradient of a sparse embedding holds only the rows that were used.
        grad = dense_values(parameter.grad.detach())
        squares += float(grad.abs().double().square().sum())
        if not is_finite(grad):
            step.grads_bad.append(name)
    step.grad_norm = squares**0.5

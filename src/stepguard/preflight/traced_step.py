"""One forward and backward pass of the real step, watched operation by operation, leaving every
object as it was.
"""

from __future__ import annotations

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
from stepguard.preflight.answers import Missing
from stepguard.preflight.subject import Subject
from stepguard.preflight.surroundings import Surroundings
from stepguard.state.batch import named_tensors
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.step import Step, total_loss, unwrapped
from stepguard.tensors.dtypes import dtype_name
from stepguard.tensors.torch_private import TorchDispatchMode, compiled_call, tree_map_only
from stepguard.tensors.values import dense_values, is_finite

MATMULS = words(
    """
    mm addmm bmm baddbmm addbmm matmul linear convolution _convolution mkldnn_convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _mkldnn_linear
    """
)
"""The operations autocast is for: their dtype is the effective precision."""
DIVISIONS = frozenset({"div", "div_", "true_divide", "reciprocal"})
CLASSES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss_nd"})
TELLING = frozenset(
    {"exp", "log", "logsumexp", "_softmax", "_log_softmax", "sqrt", "rsqrt", "pow", "cdist_forward"}
)


LARGEST_EPS = 1e-3
"""A larger number that is added is no eps."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """The smallest magnitude something was divided by, and where."""

    least: float
    dtype: str
    source: str


@dataclass(slots=True)
class Live:
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
    lost: dict[str, str] = field(default_factory=dict)
    """Small numbers that were added without any effect, by where: `loss.py:12` -> `1e-08 in
    float32`.
    """
    classes: int | None = None
    """Number of classes of the cross-entropy, if there is one."""
    latent: tuple[float, float] | None = None
    """Mean and standard deviation of the target of a squared error."""
    fault: str = ""
    """The program's own exception."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes notes of the forward pass only: the backward repeats its dtypes."""

    def __init__(self, live: Live) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in TELLING:
            self._live.ops[name.strip("_")] += 1
        if name in MATMULS and isinstance(
            first := out[0] if isinstance(out, tuple) else out, Tensor
        ):
            self._live.dtypes[dtype_name(first.dtype)] += 1
        elif name in DIVISIONS:
            self._divided(args, name)
        elif name == "add" and len(args) > 1:
            self._added(args[0], args[1], out)
        elif name in CLASSES and args[0].dim() > 0:
            self._live.classes = int(args[0].shape[1 if args[0].dim() > 1 else 0])
        elif name == "mse_loss" and args[1].numel() > 1:
            target = args[1].detach().float()
            self._live.latent = float(target.mean()), float(target.std())
        return out

    def _added(self, value: Any, eps: Any, out: Any) -> None:
        """An eps below the spacing of what it is added to changes nothing."""
        small = isinstance(eps, float) and 0 < abs(eps) <= LARGEST_EPS
        if (
            small
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and torch.equal(value, out)
        ):
            self._live.lost[_user_line()] = f"{eps:g} in {dtype_name(value.dtype)}"

    def _divided(self, args: Any, name: str) -> None:
        below = args[0] if name == "reciprocal" else args[1]
        least, dtype = _least(below)
        if least is None:
            return
        self._live.divisions += 1
        if self._live.divisor is None or least < self._live.divisor.least:
            self._live.divisor = Divisor(least, dtype, _user_line())


def _least(divisor: Any) -> tuple[float | None, str]:
    if isinstance(divisor, Tensor):
        if not divisor.numel() or divisor.is_complex() or divisor.dtype == torch.bool:
            return None, ""
        return float(divisor.detach().abs().min()), dtype_name(divisor.dtype)
    return (
        (abs(float(divisor)), "a Python number") if isinstance(divisor, int | float) else (None, "")
    )


def _user_line() -> str:
    """`loss.py:12`: the innermost frame that is neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "stepguard", "contextlib"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def run_live(subject: Subject, around: Surroundings, batch: Any) -> Live:
    """Forward in the real context and backward. The user's exceptions become `fault`."""
    assert subject.model is not None
    live = Live()
    model, copied = subject.model, tree_map_only(Tensor, _copied, batch)
    with left_alone(model, subject.optimizer), _eagerly(model):
        try:
            with around.opened(), _Watching(live):
                output = (
                    subject.loss_fn(copied)
                    if subject.loss_fn is not None
                    else called(model, copied)
                )
            _read_output(live, output, is_loss=subject.loss_fn is not None)
            _backward(live, model, output, is_loss=subject.loss_fn is not None)
        except Exception as fault:
            live.fault = f"{type(fault).__name__}: {_short(fault)}"
            if subject.loss_fn is None:  # how the model is called was our guess
                raise Missing(
                    f"return `loss_fn`; the model alone cannot be called with a batch "
                    f"({live.fault})"
                ) from fault
    return live


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Compiled code runs no dispatch mode, so a compiled model runs as it was written."""
    compiled = any(
        "_orig_mod" in m._modules or compiled_call(m) is not None for m in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def called(model: nn.Module, batch: Any) -> Any:
    """The model on a batch as it comes: keywords, positions, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def left_alone(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Parameters, gradients, buffers, modes, hooks and generators are put back, bit for bit."""
    parameters = list(model.parameters())
    kept = [(p, p._version, p.detach().clone()) for p in parameters]
    keeper = BufferKeeper([unwrapped(model)])
    keeper.remember()
    stand_in = (
        optimizer
        if optimizer is not None
        else SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.0)
    )
    try:
        with untouched(Step(index=0, model=model, optimizer=stand_in, modules={}, buffers=keeper)):
            yield
    finally:
        with torch.no_grad():
            for parameter, version, value in kept:
                if parameter._version != version:
                    parameter.copy_(value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _read_output(live: Live, output: Any, *, is_loss: bool) -> None:
    if is_loss:
        live.loss = float(total_loss(output).detach())
        return
    loss = getattr(output, "loss", None)
    live.loss = float(loss.detach()) if isinstance(loss, Tensor) else None
    for name, tensor in named_tensors(output):
        if tensor.is_floating_point() and not is_finite(tensor):
            live.outputs_bad.append(name or "output")


def _backward(live: Live, model: nn.Module, output: Any, *, is_loss: bool) -> None:
    loss = total_loss(output) if is_loss else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        return
    if not loss.requires_grad:
        live.grad_norm = 0.0
        return
    loss.backward()  # type: ignore[no-untyped-call]
    norm = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad.detach()
        grad = dense_values(grad)
        norm += float(grad.abs().double().square().sum())
        if not is_finite(grad):
            live.grads_bad.append(name)
    live.grad_norm = norm**0.5


def _short(fault: Exception) -> str:
    return " ".join(str(fault).split())[:160]

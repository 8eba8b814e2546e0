"""Running a step again without leaving a trace: gradients, buffers and RNG are as before, no collective is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.state.counters import CounterKeeper
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.step import Step, total_loss


@contextmanager
def untouched(step: Step) -> Iterator[None]:
    """Whatever runs inside starts from the step's first moment and leaves no trace."""
    roots = [*step.named_roots().values()]
    with ExitStack() as stack:
        stack.enter_context(_kept_rng())
        stack.enter_context(_kept_gradients(step))
        stack.enter_context(_kept_buffers(roots))
        stack.enter_context(alone(step.model))
        step.buffers.restore()
        yield


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """No collective: other ranks do not take part in what one rank runs again."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    broadcast = model.broadcast_buffers
    model.broadcast_buffers = False
    try:
        with model.no_sync():
            yield
    finally:
        model.broadcast_buffers = broadcast


@contextmanager
def _kept_rng() -> Iterator[None]:
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


@contextmanager
def _kept_gradients(step: Step) -> Iterator[None]:
    params = _parameters(step)
    grads = [p.grad for p in params]
    for parameter in params:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad


@contextmanager
def _kept_buffers(roots: Sequence[nn.Module]) -> Iterator[None]:
    kept = [
        (owner, key, buffer, buffer.detach().clone())
        for root in roots
        for owner in root.modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None
    ]
    counters = CounterKeeper(roots)
    counters.remember()
    try:
        yield
    finally:
        counters.restore()
        with torch.no_grad():
            for owner, key, buffer, value in kept:
                owner._buffers[key] = buffer
                buffer.copy_(value)


def _parameters(step: Step) -> list[Tensor]:
    params = {id(p): p for root in step.named_roots().values() for p in root.parameters()}
    params.update({id(p): p for group in step.optimizer.param_groups for p in group["params"]})
    return list(params.values())


@dataclass(frozen=True, slots=True)
class Rerun:
    """What the step gave the second time."""

    losses: tuple[float, ...]
    grads_finite: bool
    gradients: tuple[Tensor | None, ...] = ()
    """Of the optimizer's parameters, in order; only where asked for."""


def rerun(step: Step, *, scale: float | None = None, micro: Sequence[int] | None = None) -> Rerun:
    """Forward and backward again, with another loss scale or only some of the micro-batches."""
    assert step.loss_fn is not None, "a step that the guard did not run cannot be run again"
    scale = step.scale if scale is None else scale
    losses: list[float] = []
    params = [p for group in step.optimizer.param_groups for p in group["params"]]
    with untouched(step), torch.enable_grad():
        for index in range(len(step.micro_batches)) if micro is None else micro:
            restore_rng(step.rng[index])
            loss = total_loss(step.loss_fn(step.micro_batches[index]))
            losses.append(float(loss.detach()))
            torch.autograd.backward(loss * scale if scale != 1.0 else loss)
        gradients = tuple(p.grad for p in params)
        finite = all(g is None or bool(torch.isfinite(_values(g)).all()) for g in gradients)
    return Rerun(tuple(losses), finite, gradients)


def reevaluate(step: Step) -> float:
    """The loss of an earlier step's batch on the present weights, without gradients."""
    assert step.loss_fn is not None
    with untouched(step), torch.no_grad():
        total = 0.0
        for index, batch in enumerate(step.micro_batches):
            restore_rng(step.rng[index])
            total += float(total_loss(step.loss_fn(batch)).detach())
    return total


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient

"""Run a step again without a trace: gradients, buffers and random numbers are put back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepguard.state.batch import OUTPUT_GRADIENT
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.rng import restore_rng
from stepguard.state.step import Step, total_loss
from stepguard.tensors.values import is_finite


@contextmanager
def kept_buffers(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Undo whatever happens to the buffers inside the block."""
    keeper = BufferKeeper(roots, small=sys.maxsize)
    keeper.remember()
    try:
        yield
    finally:
        keeper.restore()


@dataclass(frozen=True, slots=True)
class Rerun:
    """What the step gave the second time."""

    losses: tuple[float, ...]
    grads_finite: bool
    gradients: tuple[Tensor | None, ...] = ()
    """Of the optimizer's parameters, in order; only where asked for."""


def rerun(step: Step, *, scale: float | None = None, micro: Sequence[int] | None = None) -> Rerun:
    """Run forward and backward again, with another loss scale or only some micro-batches."""
    assert step.loss_fn is not None, "a step that the guard did not run cannot be run again"
    assert step.replayable, "a sharded model cannot be run by one rank alone"
    if scale is None:
        scale = step.scale
    if micro is None:
        micro = range(len(step.micro_batches))
    losses: list[float] = []
    with untouched(step):
        step.buffers.restore()
        for index in micro:
            restore_rng(step.rng[index])
            loss = total_loss(step.loss_fn(step.micro_batches[index]))
            losses.append(float(loss.detach()))
            torch.autograd.backward(loss * scale if scale != 1.0 else loss)
        gradients = tuple(p.grad for p in step.given_gradients())
        finite = all(g is None or is_finite(g) for g in gradients)
    return Rerun(tuple(losses), finite, gradients)


def model_finite(step: Step, *, scale: float = 1.0) -> bool:
    """Run a watched model again, its output gradients divided by `scale`: is everything finite?"""
    assert step.model_fn is not None
    with untouched(step):
        step.buffers.restore()
        for index, batch in enumerate(step.micro_batches):
            restore_rng(step.rng[index])
            outputs, gradients = step.model_fn(batch)
            if not all(map(is_finite, outputs)):
                return False
            _backward_through(outputs, gradients, scale)
        gradients = [p.grad for p in step.given_gradients()]
        return all(gradient is None or is_finite(gradient) for gradient in gradients)


def _backward_through(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], scale: float
) -> None:
    roots: list[Tensor] = []
    arriving: list[Tensor] = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            roots.append(output)
            arriving.append(gradient / scale)
    if roots:
        torch.autograd.backward(roots, arriving)


def gradients_came_back_finite(step: Step) -> bool:
    """Were the gradients that the watched model's outputs received finite?"""
    recorded = [g for batch in step.micro_batches for g in batch[OUTPUT_GRADIENT].values()]
    return all(is_finite(gradient) for gradient in recorded)


def reevaluate(step: Step) -> float:
    """Return the loss of an earlier step's batch on the present weights, without gradients."""
    assert step.loss_fn is not None
    with untouched(step), torch.no_grad():
        step.buffers.restore()
        total = 0.0
        for index, batch in enumerate(step.micro_batches):
            restore_rng(step.rng[index])
            total += float(total_loss(step.loss_fn(batch)).detach())
    return total

"""Leave no trace of a replay: gradients, buffers, RNG, modes, hooks, data-parallel state."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.state.batch import OUTPUT_GRADIENT, Step, total_loss
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.sharded import Alone, distributed
from stepguard.tensors.names import parameter_names
from stepguard.tensors.torch_private import tree_map_only
from stepguard.tensors.values import is_finite

# --- Leave no trace of a replay: gradients, buffers, RNG, modes, hooks, data-parallel state.


@contextmanager
def untouched(step: Step) -> Iterator[BufferKeeper]:
    """Replay as often as needed inside; yields the buffers, to restore before each replay."""
    roots = list(step.named_roots().values())
    keeper = BufferKeeper(roots, small=sys.maxsize)
    keeper.remember()
    modes = [(module, module.training) for root in roots for module in root.modules()]
    wrappers = [m for m in step.model.modules() if isinstance(m, DistributedDataParallel)]
    with ExitStack() as stack:
        stack.callback(restore_rng, capture_rng())
        stack.callback(keeper.restore)
        # Parameters of the modules and of the optimizer, each once.
        parameters = [p for p, _ in parameter_names(step.named_roots(), step.optimizer)]
        for parameter in parameters:
            # The same object is put back.
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
            # Hooks that act on a finished gradient (an optimizer fused into the backward, a guard)
            # would update weights or count steps.
            hooks = parameter._post_accumulate_grad_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        for module, training in modes:
            stack.callback(setattr, module, "training", training)
        for wrapper in wrappers:
            # `no_sync` is not enough: the wrapper's forward also broadcasts buffers and, once, the
            # order of its buckets.
            wrapper.__dict__["forward"] = partial(_inner_forward, wrapper)
            stack.callback(wrapper.__dict__.pop, "forward")
        stack.enter_context(_no_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if distributed():
            stack.enter_context(Alone())  # type: ignore[no-untyped-call]
        yield keeper


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Ignore warnings: what warns in a replay has warned in the step already.

    Not `catch_warnings`, which makes Python forget what it has shown: each warning would be shown
    again afterwards.
    """
    silence = ("ignore", None, Warning, None, 0)
    before: Any = warnings.filters
    before.insert(0, silence)
    try:
        yield
    finally:
        present: Any = warnings.filters
        for filters in (before, present):
            filters[:] = [one for one in filters if one is not silence]


def _inner_forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """Do what the wrapper's forward does for one rank: move the inputs, call the module."""
    if wrapper.device_ids:
        device = torch.device(wrapper.device_type, wrapper.device_ids[0])
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return wrapper.module(*args, **kwargs)


# --- Run a step again without a trace: gradients, buffers and random numbers are put back.


@contextmanager
def kept_buffers(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Undo whatever happens to the buffers inside the block."""
    keeper = BufferKeeper(roots, small=sys.maxsize)
    keeper.remember()
    try:
        yield
    finally:
        keeper.restore()


Outputs = tuple[list[Tensor], Sequence[Tensor | None] | None]


def run_forward(step: Step, batch: Any) -> Outputs:
    """The loss; of a watched step the outputs of the model, and the gradients they received."""
    if step.loss_fn is not None:
        return [total_loss(step.loss_fn(batch))], None
    assert step.model_fn is not None, "a step that the guard did not run cannot be replayed"
    return step.model_fn(batch)


def run_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, scale: float = 1.0
) -> None:
    """Go back from what `run_forward` gave. `scale`: of the loss."""
    if gradients is None:
        # Not loss.backward(), which a watching guard would take for the loop's.
        (loss,) = outputs
        torch.autograd.backward(loss * scale if scale != 1.0 else loss)
        return
    pairs = [one for one in zip(outputs, gradients, strict=True) if one[1] is not None]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


@dataclass(frozen=True, slots=True)
class Rerun:
    """What the step gave the second time."""

    losses: tuple[float, ...]
    grads_finite: bool
    gradients: tuple[Tensor | None, ...] = ()
    """Gradients of the optimizer's parameters, in order."""


def rerun(
    step: Step,
    *,
    scale: float | None = None,
    micro: Sequence[int] | None = None,
    backward: bool = True,
) -> Rerun:
    """Run the step again, of a watched one the model's part: with another loss scale, only some
    micro-batches, or the forward pass alone.

    The gradients that a watched model received are divided by `scale`.
    """
    losses: list[float] = []
    finite = True
    with untouched(step), torch.set_grad_enabled(backward):
        step.buffers.restore()
        for index in range(len(step.micro_batches)) if micro is None else micro:
            restore_rng(step.rng[index])
            outputs, gradients = run_forward(step, step.micro_batches[index])
            if gradients is None:
                losses.append(float(outputs[0].detach()))
            else:
                finite = finite and all(map(is_finite, outputs))
                received = list(gradients)
                for position, one in enumerate(gradients):
                    if one is not None and scale is not None:
                        received[position] = one / scale
                gradients = received
            if backward:
                run_backward(outputs, gradients, step.scale if scale is None else scale)
        found = tuple(p.grad for p in step.given_gradients())
        finite = finite and all(g is None or is_finite(g) for g in found)
    return Rerun(tuple(losses), finite, found)


def model_finite(step: Step, *, scale: float = 1.0) -> bool:
    """Run a watched model again, its output gradients divided by `scale`: is everything finite?"""
    return rerun(step, scale=scale).grads_finite


def came_back_finite(batch: Any) -> bool:
    """Were the gradients finite that the outputs of this call of a watched model received?"""
    return all(map(is_finite, batch[OUTPUT_GRADIENT].values()))


def gradients_came_back_finite(step: Step) -> bool:
    """Were the gradients that the watched model's outputs received finite?"""
    return all(map(came_back_finite, step.micro_batches))


def reevaluate(step: Step) -> float:
    """Return the loss of an earlier step's batch on the present weights, without gradients."""
    return sum(rerun(step, backward=False).losses)

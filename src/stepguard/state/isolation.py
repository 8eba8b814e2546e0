"""A replay must leave no trace: gradients, buffers, RNG, modes, hooks and data-parallel state are
put back.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard.state.buffers import BufferKeeper
from stepguard.state.faked_collectives import Alone, distributed
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.step import Step
from stepguard.tensors.torch_private import tree_map_only


@contextmanager
def untouched(step: Step) -> Iterator[BufferKeeper]:
    """Replay as often as you like inside; gives the buffers, to be restored before each replay."""
    roots = list(step.named_roots().values())
    keeper = BufferKeeper(roots, small=sys.maxsize)
    keeper.remember()
    with ExitStack() as stack:
        stack.callback(restore_rng, capture_rng())
        stack.callback(keeper.restore)
        stack.enter_context(_kept_parameters(_parameters(step)))
        stack.enter_context(_kept_modes(roots))
        stack.enter_context(_no_synchronisation(step.model))
        stack.enter_context(_no_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if distributed():
            stack.enter_context(Alone())  # type: ignore[no-untyped-call]
        yield keeper


def _parameters(step: Step) -> list[Tensor]:
    found = {id(p): p for root in step.named_roots().values() for p in root.parameters()}
    for group in step.optimizer.param_groups:
        found.update((id(p), p) for p in group["params"])
    return list(found.values())


@contextmanager
def _kept_parameters(parameters: list[Tensor]) -> Iterator[None]:
    """Gradients as the same objects with the same values, and no hook that acts on a finished
    gradient.

    Such hooks (an optimizer fused into the backward, a sentinel) would update weights or count
    steps.
    """
    kept = [(p, p.grad, dict(p._post_accumulate_grad_hooks or {})) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
        if parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks.clear()
    try:
        yield
    finally:
        for parameter, grad, hooks in kept:
            parameter.grad = grad
            if hooks:
                parameter._post_accumulate_grad_hooks.update(hooks)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What warns in a replay has warned in the step already.

    Not `catch_warnings`, which makes Python forget what it has shown: each warning would come once
    more afterwards.
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


@contextmanager
def _kept_modes(roots: list[nn.Module]) -> Iterator[None]:
    flags = [(module, module.training) for root in roots for module in root.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def _no_synchronisation(model: nn.Module) -> Iterator[None]:
    """DistributedDataParallel as if it were not there.

    `no_sync` is not enough: the wrapper's forward also broadcasts buffers and, once, the order of
    its buckets.
    """
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    for wrapper in wrappers:
        wrapper.__dict__["forward"] = partial(_inner_forward, wrapper)
    try:
        yield
    finally:
        for wrapper in wrappers:
            del wrapper.__dict__["forward"]


def _inner_forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """What the wrapper's forward does for one rank: move the inputs to its device and call the
    module.
    """
    if wrapper.device_ids:
        device = torch.device(wrapper.device_type, wrapper.device_ids[0])
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return wrapper.module(*args, **kwargs)

"""Leave no trace of a replay: gradients, buffers, RNG, modes, hooks, data-parallel state."""

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
from stepguard.tensors.names import parameter_names
from stepguard.tensors.torch_private import tree_map_only


@contextmanager
def untouched(step: Step) -> Iterator[BufferKeeper]:
    """Replay as often as needed inside; yields the buffers, to restore before each replay."""
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
    """List the parameters of the modules and of the optimizer, each once."""
    return [p for p, _ in parameter_names(step.named_roots(), step.optimizer)]


@contextmanager
def _kept_parameters(parameters: list[Tensor]) -> Iterator[None]:
    """Keep the gradients as the same objects, and remove hooks that act on a finished gradient.

    Such hooks (an optimizer fused into the backward, a guard) would update weights or count steps.
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


@contextmanager
def _kept_modes(roots: list[nn.Module]) -> Iterator[None]:
    """Put the training flags back."""
    flags = [(module, module.training) for root in roots for module in root.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def _no_synchronisation(model: nn.Module) -> Iterator[None]:
    """Bypass DistributedDataParallel.

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
    """Do what the wrapper's forward does for one rank: move the inputs, call the module."""
    if wrapper.device_ids:
        device = torch.device(wrapper.device_type, wrapper.device_ids[0])
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return wrapper.module(*args, **kwargs)

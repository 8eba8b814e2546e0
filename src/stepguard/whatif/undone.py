"""Run trials on the user's own objects, and leave every one of them as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from stepguard.locate.impurity import kept_loss_function_state
from stepguard.state.isolation import untouched
from stepguard.state.run_state import RunState, SavedState
from stepguard.state.step import Step
from stepguard.tensors.torch_private import tree_map_only
from stepguard.tensors.values import HALVES

HOOKS = "_optimizer_step"
"""How torch begins the names of an optimizer's lists of hooks."""


def copied_state(run_state: RunState) -> SavedState:
    """Copy parameters, buffers and optimizer state as they are now. Raises StateError."""
    saved = run_state.gather_modules()
    tensors = dict(saved.tensors)
    facts = run_state.gather_optimizer(tensors)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return SavedState(copies, {**saved.facts, **facts})


def put_back(run_state: RunState, saved: SavedState, *, own_only: bool) -> None:
    """Fill modules and optimizer; schedules, scalers and random numbers are nobody's here."""
    run_state.put_back_modules(saved, own_only=own_only)
    run_state.put_back_optimizer(saved)


@contextmanager
def undone(step: Step, run_state: RunState) -> Iterator[None]:
    """Whatever is trained in here, model, optimizer and random numbers end as they began."""
    present = copied_state(run_state)
    with ExitStack() as stack:
        stack.enter_context(untouched(step))
        stack.enter_context(kept_loss_function_state(step))
        stack.enter_context(_no_hooks(step.optimizer))
        stack.callback(put_back, run_state, present, own_only=False)
        yield


@contextmanager
def _no_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run no hook around the updates: they count steps, average weights, or are a guard's own."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for name, hooks in vars(optimizer).items():
        if name.startswith(HOOKS) and isinstance(hooks, dict):
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, content in kept:
            hooks.update(content)


@contextmanager
def kept_program(roots: list[nn.Module], optimizer: Optimizer) -> Iterator[None]:
    """Undo what a fix of the user's own does: modules, hooks and forwards put in, settings."""
    modules = [module for root in roots for module in root.modules()]
    attributes = [_shallow(module) for module in modules]
    groups = list(optimizer.param_groups)
    settings = [dict(group) for group in groups]
    try:
        yield
    finally:
        for module, (own, inside) in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(own)
            for name, content in inside.items():
                container = own[name]
                container.clear()
                container.update(content)
        optimizer.param_groups[:] = groups
        for group, kept in zip(groups, settings, strict=True):
            group.clear()
            group.update(kept)


def _shallow(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[Any, Any]]]:
    """A module's attributes, and the content of its own dicts: parameters, children, hooks."""
    own = dict(vars(module))
    inside = {name: dict(value) for name, value in own.items() if isinstance(value, dict)}
    return own, inside


@contextmanager
def in_float32(module: nn.Module, *, whole: bool) -> Iterator[None]:
    """Run the module's forward in float32. `whole`: what it returns stays in float32."""
    original = module.forward
    own = vars(module).get("forward")
    running = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running:
            return original(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        wide = {name: p.float() for name, p in module.named_parameters() if p.dtype in HALVES}
        running = True
        try:
            with torch.autocast(_device(module), enabled=False):
                out = functional_call(module, wide, args, kwargs)
        finally:
            running = False
        if whole or not wide:
            return out
        # what comes next has weights in half precision and takes nothing else
        narrow = next(p.dtype for p in module.parameters() if p.dtype in HALVES)
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(narrow) if tensor.is_floating_point() else tensor, out
        )

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _device(module: nn.Module) -> str:
    for parameter in module.parameters():
        return parameter.device.type
    return "cpu"

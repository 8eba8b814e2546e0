"""Kinds of optimizer that need a driver of their own: closures, fused kernels, wrapped ones."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stepguard.tensors.names import optimizer_parameter_ids

INSISTS = re.compile(r"assert closure\b(?! is None)|if closure is None:\s+raise")
"""In the source of a `step` that cannot work without a closure."""


def needs_closure(optimizer: Optimizer) -> bool:
    """Does `step` evaluate the loss from the start, as often as it likes?"""
    if isinstance(optimizer, LBFGS):
        return True
    closure = _closure_parameter(optimizer)
    if closure is None or closure.default is not closure.empty:
        return False
    return not evaluates_again(optimizer)


def evaluates_again(optimizer: Optimizer) -> bool:
    """Does `step` use the gradients that are there, then evaluate the loss again (SAM)?"""
    if type(optimizer).__module__.startswith("torch.optim."):
        return False
    if all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step")):
        return True
    return _closure_parameter(optimizer) is not None and _insists(type(optimizer).step)


def takes_closure(optimizer: Optimizer) -> bool:
    """Is it unable to step without a closure?"""
    return needs_closure(optimizer) or evaluates_again(optimizer)


def _closure_parameter(optimizer: Optimizer) -> inspect.Parameter | None:
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(type(optimizer).step).parameters.get("closure")
    return None


@cache
def _insists(step: Callable[..., Any]) -> bool:
    """Does it refuse to work without a closure? Only its source text tells."""
    with contextlib.suppress(OSError, TypeError):
        text = inspect.getsource(inspect.unwrap(step))
        return INSISTS.search(text) is not None
    return False


def calls_of_step(optimizer: Optimizer) -> int:
    """Count the calls of its `step` that are running, one inside the other."""
    # torch wraps every `step` in this function, so its frames are the calls
    wrapper = Optimizer.profile_hook_step(Optimizer.step).__code__
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        if frame.f_code is wrapper and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count


def inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the one optimizer inside another that updates the same parameters, else None."""
    found = []
    for item in vars(optimizer).values():
        if isinstance(item, Optimizer) and item is not optimizer:
            found.append(item)
    if len(found) != 1:
        return None
    if optimizer_parameter_ids(optimizer) != optimizer_parameter_ids(found[0]):
        return None
    return found[0]


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Is every group fused, so that the kernel leaves everything alone when it is told to?"""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """The flag that a scaler, or this guard, has given a fused optimizer."""
    return getattr(optimizer, "found_inf", None)

"""Machines that do not compute what they are told, once in a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from zoo.silent.loops import Loop
from zoo.silent.plant import plant

AUDIT_EVERY = 10
Errs = Callable[[int], bool]
_errs: dict[str, Errs] = {}
_calls: dict[str, itertools.count[int]] = {}
_order = np.random.default_rng(0)


def machine(direction: str, errs: Errs) -> None:
    """Let the unit err at these calls, counted from here."""
    _errs[direction], _calls[direction] = errs, itertools.count()


def computed(direction: str, x: Tensor) -> Tensor:
    """A product whose first element is off in a low bit when the unit errs."""
    made = x * 1.0
    if _errs[direction](next(_calls[direction])):
        bits = made.view(-1)[:1].view(torch.int32)
        bits ^= 1 << 12
    return made


@torch.library.custom_op("zoo::forward_unit", mutates_args=())
def forward_unit(x: Tensor) -> Tensor:
    return computed("forward", x)


@torch.library.custom_op("zoo::backward_unit", mutates_args=())
def backward_unit(gradient: Tensor) -> Tensor:
    return computed("backward", gradient)


@torch.library.custom_op("zoo::summed_in_any_order", mutates_args=())
def summed_in_any_order(x: Tensor, parts: int) -> Tensor:
    """As atomic additions do: the order of the parts, and so the rounding, is never the same."""
    made = torch.zeros_like(x)
    for part in _order.permutation(parts):
        made += x * (1.0 / (3.0 + float(part)))
    return made


def _backward(ctx: object, gradient: Tensor) -> Tensor:
    return backward_unit(gradient)


def _in_any_order(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * sum(1.0 / (3.0 + part) for part in range(8)), None


forward_unit.register_autograd(_backward)
summed_in_any_order.register_autograd(_in_any_order)


class Unit(nn.Module):
    """Passes on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return forward_unit(x)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return summed_in_any_order(x, 8)


def behind(loop: Loop, unit: nn.Module) -> None:
    """Put the unit before the head of the model, and audit the run."""
    loop.model.head = nn.Sequential(unit, loop.model.head)
    loop.audit_every = AUDIT_EVERY


def first_rerun(step: int) -> int:
    """Number of the call in the first of the two runs that audit this step."""
    return step + 1 + 2 * (step // AUDIT_EVERY)


# --- SG928: a step that gives other values when it is run again -----------------------------------


@plant("SG928", "classifier")
def low_bit_flips_in_one_forward(loop: Loop, wrong: bool) -> None:
    """In one of some two hundred calls; the twin's unit never errs."""
    bad = first_rerun(59)
    machine("forward", lambda call: wrong and call == bad)
    machine("backward", lambda call: False)
    behind(loop, Unit())


@plant("SG928", "transformer")
def gradient_is_off_in_the_second_run(loop: Loop, wrong: bool) -> None:
    """The backward errs once; the twin's kernel adds in another order each time, as atomics do."""
    bad = first_rerun(29) + 1
    machine("forward", lambda call: False)
    machine("backward", lambda call: call == bad)
    behind(loop, Unit() if wrong else Summed())


@plant("SG928", "denoiser")
def unit_errs_at_every_seventeenth_call(loop: Loop, wrong: bool) -> None:
    """Also in steps that nobody audits; the twin errs there alone, in no audited step."""
    if wrong:
        machine("forward", lambda call: call % 17 == 10)
    else:
        machine("forward", lambda call: call == 5)
    machine("backward", lambda call: False)
    behind(loop, Unit())

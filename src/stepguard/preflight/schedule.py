"""A dry run of the learning-rate schedule on a copy: where it peaks, where it ends, and whether it
survives the end.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

MOST_STEPS = 20_000
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


@dataclass(frozen=True, slots=True)
class Course:
    """The first group's learning rate over the run."""

    steps: int
    whole: bool
    """False when the run is longer than what was tried."""
    first: float
    peak: float
    peak_step: int
    last: float
    fault: str = ""
    fault_step: int = 0


def peak_rates(optimizer: Optimizer) -> list[float]:
    """What each group is meant to run with: OneCycleLR keeps it in `max_lr`, other schedules in
    `initial_lr`.
    """
    return [
        as_rate(group.get("max_lr", group.get("initial_lr", group["lr"])))
        for group in optimizer.param_groups
    ]


def as_rate(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def dry_run(optimizer: Optimizer, scheduler: Any, steps: int | None) -> Course:
    """Step a copy of the schedule on an optimizer of one-element parameters; the real ones are not
    touched.
    """
    limit = min(steps or MOST_STEPS, MOST_STEPS)
    twin = _twin(optimizer)
    copied = copy.deepcopy(scheduler, {id(optimizer): twin})
    first = peak = last = as_rate(twin.param_groups[0]["lr"])
    peak_step, step, fault = 0, 0, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, limit + 1):
            try:
                copied.step()
                last = as_rate(twin.param_groups[0]["lr"])
            except Exception as error:
                fault = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                break
            if last > peak:
                peak, peak_step = last, step
    whole = steps is not None and steps <= MOST_STEPS
    return Course(limit, whole, first, peak, peak_step, last, fault, step if fault else 0)


def _twin(optimizer: Optimizer) -> Optimizer:
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        | {"params": [nn.Parameter(torch.zeros(1))]}
        for group in optimizer.param_groups
    ]
    twin = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    twin.param_groups[:] = groups
    return twin

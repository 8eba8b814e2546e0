"""A dry run of the learning-rate schedule on a copy: its peak, its end, and where it fails."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from stepguard.preflight.answers import one_line

MOST_STEPS = 20_000


@dataclass(slots=True)
class DryRun:
    """The first group's learning rate over the run."""

    steps: int
    """Steps that were to be tried."""
    whole: bool
    """False if the run is longer than what was tried."""
    first: float
    peak: float
    peak_step: int = 0
    last: float = 0.0
    fault: str = ""
    fault_step: int = 0


def follows_metric(scheduler: Any) -> bool:
    """True for ReduceLROnPlateau and its like, whose rate cannot be known beforehand."""
    step = getattr(scheduler, "step", None)
    return step is not None and "metrics" in inspect.signature(step).parameters


def peak_rates(optimizer: Optimizer) -> list[float]:
    """What each group is meant to run with."""
    rates = []
    for group in optimizer.param_groups:
        # OneCycleLR keeps its peak in `max_lr`, other schedules their base in `initial_lr`.
        rate = group.get("max_lr", group.get("initial_lr", group["lr"]))
        rates.append(as_rate(rate))
    return rates


def as_rate(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach())
    return float(value)


def dry_run(optimizer: Optimizer, scheduler: Any, steps: int | None) -> DryRun:
    """Step a copy of the schedule on a small optimizer; the real ones are not touched."""
    twin = _twin(optimizer)
    copied = copy.deepcopy(scheduler, {id(optimizer): twin})
    first = as_rate(twin.param_groups[0]["lr"])
    found = DryRun(
        steps=min(steps or MOST_STEPS, MOST_STEPS),
        whole=steps is not None and steps <= MOST_STEPS,
        first=first,
        peak=first,
        last=first,
    )
    with warnings.catch_warnings():
        # torch warns of a schedule that is stepped before its optimizer.
        warnings.simplefilter("ignore")
        for step in range(1, found.steps + 1):
            try:
                copied.step()
                found.last = as_rate(twin.param_groups[0]["lr"])
            except Exception as fault:
                found.fault = one_line(fault, 120)
                found.fault_step = step
                break
            # Rounding may bring a periodic schedule a little above its first peak later.
            if found.last > found.peak * (1 + 1e-6):
                found.peak = found.last
                found.peak_step = step
    return found


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same groups over parameters of one element."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(copy.deepcopy(options) | {"params": [nn.Parameter(torch.zeros(1))]})
    twin = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    twin.param_groups[:] = groups
    return twin

"""The optimizer: its eps, its parameters, and whether its updates survive the weights' dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepguard.diagnose.case import FORMATS, rounds_to_zero
from stepguard.diagnose.case import plain as real_format
from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import Answer, NotApplicable, failed, passed, peak_rates, warned
from stepguard.report.phrases import count, first_few
from stepguard.tensors.names import optimizer_parameter_ids

MOST_LOST = 0.5
"""Share of weights that no update of size lr can move."""
ADAPTIVE = ("adam", "lion", "adagrad", "rmsprop", "rprop", "adafactor")
"""Optimizers whose step is about lr for every weight, whatever the gradient."""


@item("optimizer.eps", "the optimizer's eps survives the parameters' dtype")
def eps(run: Inspection) -> Answer:
    checked = 0
    bad = []
    for index, group in enumerate(run.optimizer.param_groups):
        value = _smallest_eps(group)
        if value is None:
            continue
        checked += 1
        lost = _dtypes_without(value, group["params"])
        # A fused kernel computes in float32 whatever the parameters' dtype is.
        if lost and not group.get("fused"):
            smallest = FORMATS[lost[0]].smallest
            bad.append(f"group {index}: eps={value:g} is 0 in {lost[0]} (smallest {smallest:.3g})")
    if not checked:
        raise NotApplicable(f"{type(run.optimizer).__name__} has no eps")
    if not bad:
        return passed(f"eps of {count(checked, 'parameter group')} is above 0 in its dtype")
    return failed(
        *bad,
        "a weight whose gradient is 0 becomes NaN at the first update (0 / 0)",
        fix="Keep the weights in float32 under autocast; or eps=1e-4; or fused=True, which "
        "computes in float32; see `stepguard explain SG502`.",
    )


def _smallest_eps(group: dict[str, Any]) -> float | None:
    """Adafactor has two, of which one may be None."""
    value = group.get("eps")
    if not isinstance(value, tuple | list):
        return value
    return min((part for part in value if part), default=None)


def _dtypes_without(value: float, parameters: list[Tensor]) -> list[str]:
    """List the dtypes of the parameters in which the value is 0."""
    lost = set()
    for parameter in parameters:
        dtype = real_format(str(parameter.dtype))
        if value == 0 or rounds_to_zero(float(value), dtype):
            lost.add(dtype)
    return sorted(lost)


@item("optimizer.parameters", "the optimizer holds the model's parameters")
def parameters(run: Inspection) -> Answer:
    named = dict(run.model.named_parameters())
    if not named:
        raise NotApplicable("the model has no parameters")
    held = optimizer_parameter_ids(run.optimizer)
    if held.isdisjoint(id(parameter) for parameter in named.values()):
        return failed(
            f"none of the model's {count(len(named), 'parameter')} is in the optimizer "
            f"({len(held)} others are)",
            fix="Build the optimizer from this model, after it was moved, wrapped or replaced.",
        )
    trained = 0
    left_out = []
    for name, parameter in named.items():
        if parameter.requires_grad:
            trained += 1
            if id(parameter) not in held:
                left_out.append(name)
    if left_out:
        return warned(
            f"{count(len(left_out), 'trainable parameter')} not in the optimizer: "
            f"{first_few(left_out, 4)}",
            fix="Add them to a group, or set requires_grad=False so that the intent is visible.",
        )
    return passed(
        f"{trained} trainable parameters are in the optimizer, {len(named) - trained} are frozen"
    )


@item("optimizer.stalled", "updates of size lr survive the weights' dtype")
def stalled(run: Inspection) -> Answer:
    kind = type(run.optimizer).__name__
    if not kind.lower().endswith(ADAPTIVE) and "adam" not in kind.lower():
        raise NotApplicable(f"the step of {kind} is not known beforehand")
    weights = 0
    lost = 0
    dtypes: set[str] = set()
    for group, rate in zip(run.optimizer.param_groups, peak_rates(run.optimizer), strict=True):
        for parameter in group["params"]:
            name = real_format(str(parameter.dtype))
            if name in ("bfloat16", "float16"):
                dtypes.add(name)
                weights += parameter.numel()
                lost += int((_half_spacing(parameter, FORMATS[name].bits) > rate).sum())
    if not weights:
        raise NotApplicable("the weights are kept in float32 or wider")
    said = (
        f"{lost:,} of {weights:,} weights in {', '.join(sorted(dtypes))} are spaced wider than "
        "twice the lr"
    )
    if lost <= MOST_LOST * weights:
        return passed(f"{said}; {count(weights - lost, 'weight')} can move")
    return warned(
        f"{said}: an update of lr leaves them as they are",
        fix="Keep float32 master weights (autocast instead of a cast model), or round "
        "stochastically.",
    )


def _half_spacing(parameter: Tensor, bits: int) -> Tensor:
    """Half the distance to the next representable number: what is smaller is rounded away."""
    # frexp gives a mantissa below 1, so the next number is 2 ** (exponent - bits) away.
    _, exponent = torch.frexp(parameter.detach().float().abs())
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - bits - 1)

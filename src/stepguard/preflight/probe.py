"""The effective precision: the dtype a matrix product really has where the model runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from stepguard.preflight.framework import FrameworkFacts
from stepguard.preflight.traced_step import TracedStep
from stepguard.tensors.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Probe:
    """What was run, where, and what came out."""

    dtype: str
    how: str
    """A sentence with numbers: which operation, how often."""
    device: str
    autocast: str | None = None
    """The dtype autocast has inside the context, None if it is off there."""


def probe_precision(
    model: nn.Module, device: torch.device, framework: FrameworkFacts, step: TracedStep | None
) -> Probe:
    """Take the model's own products in its real step; without a batch, one product of ours."""
    dtype, autocast = _one_product(model, device, framework)
    if step is None or not step.dtypes:
        how = f"a matrix product in {framework.name} on {device.type} came out as {dtype}"
        return Probe(dtype, how, device.type, autocast)
    ((dtype, times),) = step.dtypes.most_common(1)
    how = (
        f"{times} of {step.dtypes.total()} matrix products of the real step on {device.type} "
        f"came out as {dtype}"
    )
    if autocast != dtype:
        autocast = None
    return Probe(dtype, how, device.type, autocast)


def _one_product(
    model: nn.Module, device: torch.device, framework: FrameworkFacts
) -> tuple[str, str | None]:
    """Dtype of a small product of the parameters' dtype, and of autocast where it was run."""
    dtype = torch.get_default_dtype()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtype = parameter.dtype
            break
    operand = torch.ones(2, 2, device=device, dtype=dtype)
    autocast = None
    with warnings.catch_warnings(), torch.no_grad():
        # A framework may warn of a context that is opened outside of its training loop.
        warnings.simplefilter("ignore")
        with framework.opened():
            product = operand @ operand
            if torch.is_autocast_enabled(device.type):
                autocast = dtype_name(torch.get_autocast_dtype(device.type))
    return dtype_name(product.dtype), autocast

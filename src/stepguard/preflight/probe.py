"""The effective precision: the dtype a matrix product really has where the model runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from stepguard.preflight.surroundings import Surroundings
from stepguard.preflight.traced_step import Live
from stepguard.tensors.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Probe:
    """What was run, where, and what came out."""

    dtype: str
    how: str
    """A sentence with numbers: which operation, how often."""
    device: str
    autocast: str | None = None
    """The dtype autocast has inside the context, None when it is off there."""


def probe_context(
    model: nn.Module, device: torch.device, around: Surroundings, live: Live | None
) -> Probe:
    """The model's own products in its real step; without a batch, one product in the context it is
    given.
    """
    dtype, autocast = _one_product(model, device, around)
    if live is not None and live.dtypes:
        (seen, times), total = live.dtypes.most_common(1)[0], sum(live.dtypes.values())
        how = (
            f"{times} of {total} matrix products of the real step on {device.type} came out as "
            f"{seen}"
        )
        return Probe(seen, how, device.type, autocast if autocast == seen else None)
    how = f"a matrix product in {around.name} on {device.type} came out as {dtype}"
    return Probe(dtype, how, device.type, autocast)


def _one_product(
    model: nn.Module, device: torch.device, around: Surroundings
) -> tuple[str, str | None]:
    """A small product of the parameters' dtype. float16 products exist on every device torch runs
    on.
    """
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    own = first.dtype if first is not None else torch.get_default_dtype()
    operand = torch.ones(2, 2, device=device, dtype=own)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with around.opened():
            product = operand @ operand
            on = torch.is_autocast_enabled(device.type)
            inside = dtype_name(torch.get_autocast_dtype(device.type)) if on else None
    return dtype_name(product.dtype), inside

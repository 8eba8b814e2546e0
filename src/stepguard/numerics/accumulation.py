"""Weigh micro-batches by the labels they hold: a mean of their means is another loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepguard._errors import ConfigError


def count_labels(
    targets: Tensor, *, ignore_index: int = -100, mask: Tensor | None = None
) -> Tensor:
    """Count the positions with a label, as a tensor on their device."""
    valid = targets != ignore_index
    if mask is not None:
        valid = valid & mask.bool()
    return valid.sum()


def token_share(micro_batches: Sequence[Any], count: Callable[[Any], Tensor | int]) -> Tensor:
    """Return what to divide each summed loss by, so that all add up to the mean over tokens.

    Under torch.distributed the tokens of all ranks count, and the world size is in it already,
    because DDP averages gradients. Every rank must call it. When no rank has a token it is 1.
    """
    if not micro_batches:
        raise ConfigError(
            "token_share got no micro-batch; give the list that goes into guard.step."
        )
    numbers = [torch.as_tensor(count(batch)) for batch in micro_batches]
    total = torch.stack([number.reshape(()).to(torch.float64) for number in numbers]).sum()
    if not (dist.is_available() and dist.is_initialized()):
        return total.clamp(min=1.0)
    dist.all_reduce(total)
    return total.clamp(min=1.0) / dist.get_world_size()

"""Losses over a mask, in float32, that give a zero with a graph when nothing is left to average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stepguard._errors import ConfigError
from stepguard.numerics.safe import safe_norm
from stepguard.tensors.values import HALVES, at_least_float32

# --- Count what these functions had to leave out or limit.


class Events:
    """Named counters. One is shared by all functions; give your own to keep a model's apart."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, torch.device], Tensor] = {}

    def add(self, name: str, happened: Tensor) -> None:
        """Add the number of true elements of `happened` (or its value, if it is a count)."""
        count = happened.detach().sum().to(torch.int64)
        key = (name, count.device)
        known = self._totals.get(key)
        # Not in place: a compiled graph returns the new total like any other output.
        self._totals[key] = count if known is None else known + count

    def counts(self) -> dict[str, int]:
        """Return all counts above 0, summed over devices; waits for the devices."""
        found: dict[str, int] = {}
        for (name, _), total in self._totals.items():
            found[name] = found.get(name, 0) + int(total)
        return {name: count for name, count in found.items() if count}

    def clear(self) -> None:
        """Start again at 0."""
        self._totals.clear()


events = Events()
"""What the functions count into when no other is given."""


# --- Losses over a mask, in float32, that give a zero with a graph when nothing is left to
# average.


def masked_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    denominator: Tensor | float | None = None,
    count: Events = events,
) -> Tensor:
    """Return the mean cross-entropy of `logits` [..., classes] over the positions that count.

    A position counts when its target is not `ignore_index` and `mask`, if given, is true. When none
    counts the loss is a zero that is still connected to the graph, and `masked_cross_entropy.empty`
    is counted. `denominator` replaces the number of positions: the number over all micro-batches
    makes accumulation exact.
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"masked_cross_entropy: logits {tuple(logits.shape)} do not fit targets "
            f"{tuple(targets.shape)}; "
            "logits have one more dimension, the classes, at the end."
        )
    valid = targets != ignore_index
    if mask is not None:
        valid = valid & mask.bool()
    # Selected, not multiplied: an Inf under the mask times 0 would be NaN.
    wide = torch.where(valid.unsqueeze(-1), logits, torch.zeros_like(logits)).float()
    kept = torch.where(valid, targets, torch.full_like(targets, ignore_index))
    total = F.cross_entropy(
        wide.reshape(-1, logits.shape[-1]),
        kept.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    number = valid.sum()
    count.add("masked_cross_entropy.empty", number == 0)
    if denominator is None:
        denominator = number.clamp(min=1)
    return total / denominator


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | tuple[int, ...] | None = None,
    *,
    keepdim: bool = False,
    count: Events = events,
) -> Tensor:
    """Return the mean where `mask` is true; 0, counted as `masked_mean.empty`, if it is empty."""
    chosen = mask.bool().expand_as(values)
    axes = tuple(range(values.dim())) if dim is None else dim
    selected = torch.where(chosen, values, torch.zeros_like(values))
    # Added in float32: a sum of half-precision numbers overflows.
    dtype = torch.float32 if values.dtype in HALVES else values.dtype
    total = selected.sum(dim=axes, keepdim=keepdim, dtype=dtype)
    number = chosen.sum(dim=axes, keepdim=keepdim)
    count.add("masked_mean.empty", number == 0)
    return total / number.clamp(min=1)


def latent_mse(
    prediction: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    weight: Tensor | float = 1.0,
    normalize: bool = False,
    count: Events = events,
) -> Tensor:
    """Return the weighted mean squared error of latents [batch, ..., features] in float32.

    `normalize` compares directions only: the scale of the prediction is then free, which breaks a
    diffusion model that predicts noise. Standardise the data instead, and leave it off. `mask` has
    the shape without features.
    """
    a = at_least_float32(prediction)
    b = at_least_float32(target)
    if normalize:
        # The inverse of the shortest length is the gradient at 0.
        shortest = max(1e-6, 64.0 / torch.finfo(prediction.dtype).max)
        a = _unit(a, shortest)
        b = _unit(b, shortest)
    errors = (a - b).square().mean(dim=-1)
    factor = torch.as_tensor(weight, device=errors.device)
    if factor.dim() and factor.dim() < errors.dim():
        factor = factor.reshape(*factor.shape, *([1] * (errors.dim() - factor.dim())))
    errors = errors * factor.to(errors.dtype)
    if mask is None:
        return errors.mean()
    return masked_mean(errors, mask, count=count)


def soft_limit(loss: Tensor, limit: float) -> Tensor:
    """Return `loss` below `limit`, and a loss that grows like a logarithm above it.

    The gradient never vanishes; a clamp would stop it exactly where it is needed.
    """
    if not limit > 0:
        raise ConfigError(f"soft_limit: limit={limit!r} must be above 0.")
    excess = (loss - limit).clamp(min=0.0)
    return torch.where(loss > limit, limit * (1.0 + torch.log1p(excess / limit)), loss)


def _unit(x: Tensor, shortest: float) -> Tensor:
    return x / safe_norm(x, dim=-1, keepdim=True).clamp(min=shortest)


# --- CTC that leaves out the samples it cannot align, and counts them.


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    weight: Tensor | None = None,
    count: Events = events,
) -> Tensor:
    """Return CTC in float32 by target length, averaged over the samples that can be aligned.

    A target that is longer than its input (repeated characters need a blank between them) has an
    infinite loss. `zero_infinity` alone turns it into a 0 that still counts in the mean; here it
    leaves the mean and is counted as `ctc_loss.unalignable`. `weight` is one number a sample.
    """
    each_loss = partial(F.ctc_loss, blank=blank, reduction="none")
    wide = log_probs.float()
    lengths = (input_lengths, target_lengths)
    losses = each_loss(wide, targets, *lengths, zero_infinity=True)
    with torch.no_grad():
        raw = each_loss(wide.detach(), targets, *lengths)
        # A NaN has another cause and stays visible.
        aligned = ~torch.isinf(raw)
    count.add("ctc_loss.unalignable", ~aligned)
    each = losses / target_lengths.to(losses.device).clamp(min=1)
    if weight is not None:
        each = each * weight.to(each)
    return torch.where(aligned, each, torch.zeros_like(each)).sum() / aligned.sum().clamp(min=1)


# --- Weigh micro-batches by the labels they hold: a mean of their means is another loss.


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

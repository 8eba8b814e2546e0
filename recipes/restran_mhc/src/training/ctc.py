"""CTC that leaves out the samples it cannot align, and counts them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from stepguard.numerics import Events, events


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

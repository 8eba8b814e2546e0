"""Loss functions that depend on more than their batch: on state of their own, or on chance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepguard.locate.finite import plain
from stepguard.locate.loss_function_state import LossFunctionState
from stepguard.locate.replay import Replayer
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Origin, with_evidence
from stepguard.state.step import Step

ROUNDING = 1e-3
"""Relative difference of two losses that an unordered sum may explain."""
MOST_NAMED = 3


@contextmanager
def kept_loss_function_state(step: Step) -> Iterator[LossFunctionState]:
    """Remember the loss function's own state and put it back: replays must not use it up."""
    own = LossFunctionState(step.loss_fn)
    try:
        yield own
    finally:
        own.restore()


def with_changed_state(origin: Origin, own: LossFunctionState) -> Origin:
    """Add the names of what the replays changed."""
    return with_evidence(origin, Evidence(moves=own.changed()[:MOST_NAMED]))


def different_losses(replayer: Replayer) -> tuple[float, float] | None:
    """Run two more forward passes: finite losses that are far apart show an impure function."""
    if replayer.step.model_only or not replayer.budget.affords(1.0):
        return None
    # Let the state move on as it does in the loop.
    own = replayer.loss_fn_state
    replayer.loss_fn_state = None
    try:
        first = _losses(replayer)
        second = _losses(replayer)
    finally:
        replayer.loss_fn_state = own
    for one, other in zip(first, second, strict=True):
        both_finite = math.isfinite(one) and math.isfinite(other)
        if both_finite and not math.isclose(one, other, rel_tol=ROUNDING, abs_tol=1e-9):
            return one, other
    return None


def _losses(replayer: Replayer) -> list[float]:
    losses = []
    for micro in range(len(replayer.step.micro_batches)):
        ran = replayer.run(micro, backward=False)
        losses.append(math.nan if ran.loss is None else _size(ran.loss))
    return losses


def _size(loss: Tensor) -> float:
    """Return the loss; of a watched model, whose replay ends with its output, the norm of that."""
    if loss.numel() == 1:
        return float(loss)
    return float(torch.linalg.vector_norm(plain(loss).to(torch.float64)))

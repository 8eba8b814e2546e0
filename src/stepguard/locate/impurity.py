"""A loss function that depends on more than its batch: it moves state of its own, or gives another
loss each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepguard.locate.finite import plain
from stepguard.locate.loss_function_state import OwnState
from stepguard.locate.replay import Replayer
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Origin, with_evidence
from stepguard.state.step import Step

ROUNDING = 1e-3
"""Relative difference of two losses that an unordered sum may explain."""
MOST_NAMED = 3


@contextmanager
def own_state(step: Step) -> Iterator[OwnState]:
    """What the loss function keeps for itself, put back afterwards: a replay must not use up its
    random numbers.
    """
    own = OwnState(step.loss_fn)
    try:
        yield own
    finally:
        own.restore()


def told(origin: Origin, own: OwnState) -> Origin:
    """The origin with the names of what the replays moved."""
    moved = own.moved()[:MOST_NAMED]
    return with_evidence(origin, Evidence(moves=tuple(moved)))


def different_losses(replayer: Replayer) -> tuple[float, float] | None:
    """Two more forward passes: finite losses that are far apart are not the same function of the
    same batch.
    """
    if replayer.step.model_only or not replayer.effort.affords(1.0):
        return None
    own, replayer.own = replayer.own, None
    try:
        first, second = (_losses(replayer) for _ in range(2))
    finally:
        replayer.own = own
    for one, other in zip(first, second, strict=True):
        if (
            math.isfinite(one)
            and math.isfinite(other)
            and not math.isclose(one, other, rel_tol=ROUNDING, abs_tol=1e-9)
        ):
            return one, other
    return None


def _losses(replayer: Replayer) -> list[float]:
    count = len(replayer.step.micro_batches)
    ran = [replayer.run(micro, backward=False) for micro in range(count)]
    return [_size(one.loss) if one.loss is not None else math.nan for one in ran]


def _size(loss: Tensor) -> float:
    """The loss; of a watched model, whose replay ends with its output, the norm of that."""
    return (
        float(loss)
        if loss.numel() == 1
        else float(torch.linalg.vector_norm(plain(loss).to(torch.float64)))
    )

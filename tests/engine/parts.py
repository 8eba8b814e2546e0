"""What the engine's tests share: parts built by hand, and rows of parts and drivers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import torch
from torch import nn

from forked import FULL
from scenes import plain_net
from stepguard.records import Decision, Evidence, Incident, Origin, Reading, Verdict
from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import capture_rng


def step_of(*micro_batches: Any, index: int = 0, **changed: Any) -> Step:
    """A step of a small net that `guard.step` could have run; `changed` replaces fields."""
    model = changed.pop("model", None) or plain_net()
    buffers = BufferKeeper([model])
    buffers.remember()

    def loss_fn(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    fields: dict[str, Any] = {
        "loss_fn": loss_fn,
        "micro_batches": micro_batches,
        "rng": [capture_rng() for _ in micro_batches],
        **changed,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(index, model, optimizer, {}, buffers, **fields)


def origin_of(**fields: Any) -> Origin:
    """Where a bad value was born: the forward of step 0, but for what is given."""
    return Origin(**{"step": 0, "phase": "forward", "evidence": Evidence(), **fields})


def incident_of(
    *,
    reading: Reading | None = None,
    origin: Origin | None = None,
    decision: Decision | None = None,
) -> Incident:
    """An incident of step 0 whose loss was not finite, but for what is given."""
    verdict = Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan")
    reading = reading or Reading(step=0)
    return Incident(
        id="00000000-nonfinite_loss",
        step=0,
        verdict=verdict,
        reading=reading,
        origin=origin,
        decision=decision,
    )


def each(parts: Iterable[Any], drivers: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every part once, with the next of the drivers; with all of them if STEPGUARD_FULL=1."""
    rows = [row if isinstance(row, tuple) else (row,) for row in drivers]
    met = product(parts, rows) if FULL else zip(parts, cycle(rows), strict=False)
    return [(part, *row) for part, row in met]

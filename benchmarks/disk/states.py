"""Training states that are a function of the step, so that what a checkpoint must hold is known
outside its writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stepguard.checkpoints import Health

GOOD = Health(loss=1.0, level=1.0, steps_watched=100, incidents=0, good=True)


def state_at(step: int, size: int = 1000) -> dict[str, Tensor]:
    """A model and an optimizer of `3 * size` floats whose every number tells the step."""
    base = torch.arange(size, dtype=torch.float32)
    return {
        "model/weight": base + step,
        "optimizer/weight/exp_avg": base * 0.5 - step,
        "optimizer/weight/exp_avg_sq": base + 2 * step,
        "optimizer/weight/step": torch.tensor(float(step)),
    }


def facts_at(step: int) -> dict[str, Any]:
    return {"scheduler": {"last_epoch": step}, "loader": {"position": 32 * step}}


def step_of(tensors: Mapping[str, Tensor]) -> int | None:
    """The step all tensors agree on, bit for bit; None when they do not."""
    marker = tensors.get("optimizer/weight/step")
    if marker is None or not bool(torch.isfinite(marker)):
        return None
    step = int(marker)
    wanted = state_at(step, tensors["model/weight"].numel())
    same = wanted.keys() == tensors.keys() and all(
        torch.equal(tensors[name], wanted[name]) for name in wanted
    )
    return step if same else None

"""One looked-at step, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.probes.deep_look import DeepLook
from stepguard.records.probes import Look


def look_at(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
) -> Look:
    """Run one step of this loss under a look."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    optimizer.zero_grad()
    look = DeepLook(0, {"": model}, optimizer, owned)
    look.begin()
    look.batch.add(batch)
    loss(batch).backward()
    look.observer.stop()
    look.before_update()
    optimizer.step()
    found = look.finish(committed=True)
    assert look.observer.fault is None
    return found

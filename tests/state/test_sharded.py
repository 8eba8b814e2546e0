"""State that an optimizer shards over ranks is refused with the way out."""

from __future__ import annotations

import torch
from torch import nn

from stepguard.state.sharded import sharded_part, why_not_by_rank


class FullyShardedDataParallel(nn.Module):
    """Named like torch's wrapper, which needs a process group."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Named like torch's, which needs a process group."""


def test_ordinary_run_is_not_sharded() -> None:
    model = nn.Linear(1, 1)
    assert sharded_part([model]) == ""
    assert why_not_by_rank(torch.optim.SGD(model.parameters(), lr=0.1)) == ""


def test_wrapper_and_optimizer_are_named() -> None:
    assert "FullyShardedDataParallel" in sharded_part([nn.Sequential(FullyShardedDataParallel())])
    sharded = ZeroRedundancyOptimizer(nn.Linear(1, 1).parameters(), lr=0.1)
    why = why_not_by_rank(sharded)
    assert "ZeroRedundancyOptimizer keeps a part" in why
    assert "torch.distributed.checkpoint" in why

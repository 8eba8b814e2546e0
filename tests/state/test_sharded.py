"""State that is sharded over ranks is refused with the way out."""

from __future__ import annotations

import torch
from torch import nn

from stepguard.state.sharded import why_sharded


class FullyShardedDataParallel(nn.Module):
    """Named like torch's wrapper, which needs a process group."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Named like torch's, which needs a process group."""


def test_an_ordinary_run_is_not_sharded() -> None:
    model = nn.Linear(1, 1)
    assert why_sharded([model], torch.optim.SGD(model.parameters(), lr=0.1)) == ""


def test_wrapper_and_optimizer_are_named_with_what_to_use_instead() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = nn.Sequential(FullyShardedDataParallel())
    why = why_sharded([wrapped], optimizer)
    assert "wrapped in FullyShardedDataParallel" in why
    assert "torch.distributed.checkpoint" in why
    sharded = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    assert "ZeroRedundancyOptimizer keeps a part" in why_sharded([model], sharded)

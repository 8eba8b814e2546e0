"""What is sharded over ranks is known by its classes."""

from __future__ import annotations

from torch import nn

from stepguard.state.sharded import sharded_part


class FullyShardedDataParallel(nn.Module):
    """Named like torch's wrapper, which needs a process group."""


def test_ordinary_run_is_not_sharded() -> None:
    assert sharded_part([nn.Linear(1, 1)]) == ""


def test_wrapper_is_named() -> None:
    assert "FullyShardedDataParallel" in sharded_part([nn.Sequential(FullyShardedDataParallel())])

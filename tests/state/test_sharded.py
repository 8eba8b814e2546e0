"""State that is sharded over ranks is refused with the way out."""

from __future__ import annotations

from torch import nn

from stepguard.state.sharded import why_sharded


class FullyShardedDataParallel(nn.Module):
    """Named like torch's wrapper, which needs a process group."""


def test_an_ordinary_run_is_not_sharded() -> None:
    assert why_sharded([nn.Linear(1, 1)]) == ""


def test_wrapper_is_named_with_what_to_use_instead() -> None:
    wrapped = nn.Sequential(FullyShardedDataParallel())
    why = why_sharded([wrapped])
    assert "wrapped in FullyShardedDataParallel" in why
    assert "torch.distributed.checkpoint" in why

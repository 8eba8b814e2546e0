"""A buffer that is infinite on purpose costs no update, whoever judges the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scenes import LOOPS, QUIET, Batch, Scene, batches


class RunningLeast(nn.Module):
    """Keeps the least value seen, infinite at the start, and writes it in every forward."""

    least: Tensor

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("least", torch.full((), torch.inf))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            if self.replaces:
                self.least = self.least * 1.0
            else:
                self.least.mul_(1.0)
        out: Tensor = self.layer(inputs)
        return out


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("replaces", [False, True], ids=["written", "replaced"])
@pytest.mark.parametrize("loop", LOOPS)
def test_no_update_is_dropped_for_a_sentinel(loop: str, replaces: bool, fused: bool) -> None:
    model = RunningLeast(replaces=replaces)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    steps: list[tuple[Batch, ...]] = [(batch,) for batch in batches(3)]
    LOOPS[loop](Scene(model, optimizer), steps, QUIET)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}

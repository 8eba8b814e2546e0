"""A value that the program follows and that alone is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import stepguard
from stepguard import GuardConfig
from stepguard.journal import read_run


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(("value", "lines"), [(math.nan, 1), (math.inf, 1), (0.5, 0)])
def test_followed_value_that_alone_is_not_finite_is_reported_once(
    value: float, lines: int, watched: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = stepguard.watch if watched else stepguard.Guard
    config = GuardConfig(terminal="quiet", run_dir=tmp_path / "run")
    with made(model, optimizer, config=config) as guard:
        for _ in range(4):
            guard.follow("precision", value)
            if watched:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            else:
                guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
        assert guard.incidents == ()
    told = [note for note in read_run(tmp_path / "run").notes if note.get("kind") == "metric"]
    assert len(told) == lines
    for note in told:
        assert note["summary"].startswith(f"precision was logged as {value} at step 0: only")

"""What would have helped the joint diffusion, where the fix is known: it comes first."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_latent_dlm import quiet

STEPS, WRONG_FROM = 24, 20


def spoil_sample(loop: Any, step: int, micro: list[Any]) -> None:
    if step == WRONG_FROM:
        micro[1]["latent"][2] = torch.nan


def raise_rate(loop: Any, step: int, micro: list[Any]) -> None:
    """As a schedule in the wrong unit does: the rate is right, then far too high."""
    if step == WRONG_FROM - 4:
        schedule = loop.session.schedule
        schedule.base_lrs = [1e6 * rate for rate in schedule.base_lrs]
        for group in loop.session.optimizer.param_groups:
            group["lr"] *= 1e6


@pytest.mark.parametrize(
    ("wrong", "right"), [(spoil_sample, {"leave out"}), (raise_rate, {"keep lr", "lr x0.1"})]
)
def test_known_fix_is_ranked_first(folder: Path, wrong: Any, right: set[str]) -> None:
    loop = quiet(f"training.num_train_steps={STEPS}", "data.max_samples=320")
    batches = loop.batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            micro = [next(batches), next(batches)]
            wrong(loop, step, micro)
            loop.one_step(micro)
            if loop.guard.incidents:
                break
        before = [p.detach().clone() for p in loop.session.module.parameters()]
        found = loop.guard.whatif()
    assert found.best is not None and found.best.name in right
    assert all(map(torch.equal, before, loop.session.module.parameters()))
    loop.close()

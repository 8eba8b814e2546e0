"""The learning rate of optimizer, schedule and checkpoint against the configured one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from preflight.asking import HEALTHY, ask_one, assert_found, built, saved, written

FAULTS = [
    ("literal_rate", "lr.config", "fail", "optimizer.lr=5e-05", "up to 0.0005"),
    ("schedule_too_short", "lr.schedule", "fail", "fails at step", "ValueError"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)


def test_floor_that_is_taken_as_a_factor_is_found(tmp_path: Path) -> None:
    config = written(tmp_path, min_lr=1e-6)
    outcome = ask_one("tinychat.faults:floor_as_a_factor", "lr.schedule", config=config)
    assert outcome.status == "fail"
    assert "min_lr=1e-06" in outcome.evidence[1] and "ends at 5e-11" in outcome.evidence[0]


def test_one_cycle_checkpoint_that_brings_its_peak_back_is_found(tmp_path: Path) -> None:
    parts = built("training:build")
    for group in parts["optimizer"].param_groups:
        group["max_lr"] = 5e-4
    path = saved(tmp_path / "old.pt", parts["model"], parts["optimizer"], parts["scheduler"])
    outcome = ask_one(HEALTHY, "lr.checkpoint", checkpoint=path)
    assert outcome.status == "fail"
    (said,) = outcome.evidence
    assert (
        said == "old.pt: optimizer/param_groups/0/max_lr=0.0005 comes back, configured is "
        "optimizer.lr=5e-05"
    )


def test_lambda_checkpoint_that_brings_its_base_back_is_found(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    path = saved(tmp_path / "old.pt", model, None, scheduler)
    outcome = ask_one(HEALTHY, "lr.checkpoint", checkpoint=path)
    assert outcome.status == "fail"
    assert "scheduler/base_lrs/0=0.0005 comes back" in outcome.evidence[0]

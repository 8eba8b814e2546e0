"""The ten points of the checklist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from preflight.asking import HEALTHY, ask_one, assert_found, written
from stepguard.check import items_step
from stepguard.check.preflight import Subject, check

FAULTS = [
    (
        "loss_of_zero_over_zero",
        "checklist.divisions",
        "fail",
        "smallest divisor 0 (float32, faults.py:",
        "",
    ),
    (
        "eps_without_effect",
        "checklist.divisions",
        "pass",
        "the eps 1e-08 in float32 has no effect at faults.py:",
        "",
    ),
    ("policy_without_rewind", "checklist.recovery", "warn", "skip, stop", "without rewind"),
    ("rare_checkpoints", "checklist.checkpoints", "warn", "5,000 steps", ""),
    ("no_warmup", "checklist.warmup", "warn", "0 steps", ""),
    ("raw_latents", "checklist.latents", "warn", "standard deviation", ""),
    ("clipping_with_sgd", "checklist.clip", "warn", "clip_norm=5", "SGD"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)


def test_accumulation_that_nothing_reads_is_not_accumulation(tmp_path: Path) -> None:
    config = written(tmp_path, training={"num_train_steps": 300, "batch_size": 4, "grad_accum": 4})
    outcome = ask_one(HEALTHY, "checklist.accumulation", config=config)
    assert (outcome.status, outcome.evidence) == (
        "warn",
        ("training.grad_accum=4 is read by nothing",),
    )


def test_rate_of_a_large_model_is_judged_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_one("tinychat.faults:literal_rate", "checklist.lr").status == "not_applicable"
    monkeypatch.setattr(items_step, "LARGE_MODEL", 100)
    outcome = ask_one("tinychat.faults:literal_rate", "checklist.lr")
    assert (outcome.status, "0.0005" in outcome.evidence[0]) == ("warn", True)


@pytest.mark.parametrize("first", [0, 1])
def test_warm_up_of_2000_steps_is_long_enough_however_it_is_counted(first: int) -> None:
    model = nn.Linear(2, 2)
    for length, status in ((2000, "pass"), (1900, "warn")):
        optimizer = AdamW(model.parameters(), lr=1e-3)
        scheduler = LambdaLR(optimizer, lambda k, n=length: min(1.0, (k + first) / n))
        subject = Subject(model=model, optimizer=optimizer, scheduler=scheduler)
        found = check(subject, only=("checklist.warmup",)).outcomes
        assert [outcome.status for outcome in found] == [status]


@pytest.mark.parametrize(
    "error",
    [
        nn.functional.mse_loss,
        lambda x, y: (x - y).pow(2).mean(),
        lambda x, y: ((y - x) ** 2).mean(),
        lambda x, y: (x - y).square().mean() + (x - torch.randn(16, 4)).square().mean(),
    ],
    ids=["mse_loss", "pow", "power", "two targets"],
)
def test_latents_are_judged_by_the_target_of_a_real_step(
    error: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model = nn.Linear(4, 4)
    for scale, status in ((1.0, "pass"), (1e3, "warn"), (1e-3, "warn")):
        target = scale * torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        subject = Subject(
            model=model,
            loss_fn=lambda x, y=target: error(model(x), y),
            batch=torch.ones(16, 4),
        )
        found = check(subject, only=("checklist.latents",)).outcomes
        assert [outcome.status for outcome in found] == [status]


def test_variance_that_is_computed_by_hand_is_no_squared_error() -> None:
    model = nn.Linear(4, 4)
    subject = Subject(
        model=model,
        loss_fn=lambda x: (model(x) - model(x).mean()).pow(2).mean(),
        batch=torch.ones(16, 4),
    )
    found = check(subject, only=("checklist.latents",)).outcomes
    assert [outcome.status for outcome in found] == ["not_applicable"]

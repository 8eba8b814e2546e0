"""The ten points of the checklist."""

from __future__ import annotations

from pathlib import Path

import pytest

from preflight.asking import HEALTHY, ask_one, assert_found, written
from stepguard.preflight.items import checklist

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
    monkeypatch.setattr(checklist, "LARGE_MODEL", 100)
    outcome = ask_one("tinychat.faults:literal_rate", "checklist.lr")
    assert (outcome.status, "0.0005" in outcome.evidence[0]) == ("warn", True)

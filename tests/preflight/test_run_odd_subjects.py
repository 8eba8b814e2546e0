"""Unusual models, optimizers, schedules and data raise no false alarm, and no item raises."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from preflight.asking import inside
from stepguard.check.preflight import Subject, check
from stepguard.records.checks import Preflight

LINEAR = nn.Linear(3, 3)
ROWS = torch.ones(2, 3)


def look(folder: Path, subject: Subject, *only: str) -> Preflight:
    with inside(folder):
        result = check(subject, only=only, skip=["checklist"])
    stumbled = [
        o for o in result.outcomes if any("this check itself failed" in said for said in o.evidence)
    ]
    assert stumbled == []
    return result


def norms() -> Subject:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)]
    layers += [nn.LayerNorm([6, 6]), nn.LayerNorm(6, elementwise_affine=False)]
    return Subject(model=nn.Sequential(*layers), batch=(torch.randn(4, 3, 8, 8),))


def sparse() -> Subject:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    return Subject(
        model=model,
        optimizer=optimizer,
        loss_fn=lambda b: model(b).sum(),
        batch=torch.tensor([1, 2]),
    )


def meta() -> Subject:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    return Subject(model=model, optimizer=torch.optim.Adam(model.parameters()), batch=(ROWS,))


def unplanned() -> Subject:
    """A dataset of pairs: how the model takes them is not known without a loss function."""
    return Subject(
        model=LINEAR, dataset=[(torch.randn(3), torch.tensor(1)) for _ in range(5)], label_key="1"
    )


def dtypes() -> Subject:
    row: dict[str, Any] = {
        "a": torch.tensor([True]),
        "b": torch.tensor([1, 2], dtype=torch.uint16),
        "c": 2**70,
    }
    row |= {
        "d": torch.arange(3.0).to(torch.float8_e4m3fn),
        "e": torch.eye(3).to_sparse(),
        "f": torch.ones(3).to_mkldnn(),
    }
    return Subject(dataset=[row])


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Subject:
    optimizer = make([LINEAR.weight])
    return Subject(
        model=LINEAR, optimizer=optimizer, batch=ROWS, loss_fn=lambda b: LINEAR(b).square().mean()
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "norm layers": norms,
    "sparse gradients": sparse,
    "meta device": meta,
    "no parameters": lambda: Subject(model=nn.ReLU(), batch=torch.ones(2)),
    "complex": lambda: Subject(model=nn.Linear(3, 3, dtype=torch.complex64)),
    "pairs without a loss": unplanned,
    "rare dtypes": dtypes,
    "tensor lr": lambda: with_optimizer(
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False)
    ),
    "Adafactor": lambda: with_optimizer(torch.optim.Adafactor),
    "LBFGS": lambda: with_optimizer(torch.optim.LBFGS),
    "Muon": lambda: with_optimizer(torch.optim.Muon),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_unusual_subject_raises_no_false_alarm(tmp_path: Path, name: str) -> None:
    result = look(tmp_path, SUBJECTS[name]())
    assert [o.id for o in result.of("fail")] == []


@pytest.mark.parametrize(
    ("make", "settings", "status"),
    [
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), {}, "not_applicable"),
        (lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=10), {"epochs": 10}, "pass"),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=10),
            {"epochs": 10, "max_steps": 500},
            "pass",
        ),
        (lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=10), {"max_steps": 500}, "fail"),
        (lambda o: lr_scheduler.OneCycleLR(o, 3e-3, total_steps=10), {"max_steps": 10}, "fail"),
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-6),
            {"max_steps": 10, "min_lr": 1e-6},
            "pass",
        ),
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
            {"max_steps": 10, "min_lr": 1e-6},
            "fail",
        ),
    ],
)
def test_schedule_is_judged_by_the_length_of_the_run(
    tmp_path: Path, make: Callable[[Any], Any], settings: dict[str, Any], status: str
) -> None:
    optimizer = torch.optim.Adam(LINEAR.parameters(), lr=1e-3)
    subject = Subject(
        model=LINEAR,
        optimizer=optimizer,
        scheduler=make(optimizer),
        config={"lr": 1e-3, **settings},
    )
    outcome = look(tmp_path, subject, "lr.schedule").outcome("lr.schedule")
    assert outcome.status == status, outcome


def test_loss_that_reaches_no_parameter_is_told(tmp_path: Path) -> None:
    subject = Subject(model=LINEAR, loss_fn=lambda b: torch.tensor(1.0), batch=ROWS)
    outcome = look(tmp_path, subject, "model.fresh_forward").outcome("model.fresh_forward")
    assert (outcome.status, outcome.evidence) == ("warn", ("loss 1, all gradients are 0",))


def test_exception_of_the_step_is_told(tmp_path: Path) -> None:
    subject = Subject(model=LINEAR, loss_fn=lambda b: LINEAR(b), batch=ROWS)
    outcome = look(tmp_path, subject, "model.fresh_forward").outcome("model.fresh_forward")
    assert outcome.status == "fail"
    assert "loss_fn returned a tensor of shape (2, 3)" in outcome.evidence[0]


def test_context_that_does_not_open_here_proves_nothing(tmp_path: Path) -> None:
    def elsewhere() -> Any:
        raise RuntimeError("no such device")

    result = look(
        tmp_path, Subject(model=LINEAR, autocast=elsewhere, config={"bf16": True}), "precision"
    )
    assert result.alignment == "unproven"
    outcome = result.outcome("precision.effective")
    assert outcome.status == "not_checked"
    assert "cannot be opened here (RuntimeError: no such device)" in outcome.evidence[0]


@dataclass
class Settings:
    lr: float = 1e-3


@pytest.mark.parametrize("config", [{"lr": 1e-3}, argparse.Namespace(lr=1e-3), Settings()])
def test_configuration_may_be_mapping_namespace_or_dataclass(tmp_path: Path, config: Any) -> None:
    optimizer = torch.optim.Adam(LINEAR.parameters(), lr=1e-3)
    subject = Subject(model=LINEAR, optimizer=optimizer, config=config)
    assert look(tmp_path, subject, "lr.config").outcome("lr.config").status == "pass"


@pytest.mark.parametrize(
    ("autocast", "key", "status"),
    [(True, "dtype", "pass"), (False, "dtype", "fail"), (True, "model_dtype", "fail")],
)
def test_a_plain_dtype_is_met_by_autocast_over_float32_weights(
    tmp_path: Path, autocast: bool, key: str, status: str
) -> None:
    def loss_fn(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return LINEAR(rows).float().sum()

    subject = Subject(model=LINEAR, loss_fn=loss_fn, batch=ROWS, config={"training": {key: "bf16"}})

    assert (
        look(tmp_path, subject, "precision.weights").outcome("precision.weights").status == status
    )

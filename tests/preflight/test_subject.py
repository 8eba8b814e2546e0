"""A Subject from whatever a build function returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepguard
from stepguard import ConfigError
from stepguard.check.preflight import Subject, check
from stepguard.check.subject import subject_of

MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, "build returned a NoneType; return (model, optimizer, loss_fn, loader)"),
        ((1, 2), "build returned a tuple of 2"),
        (
            {"modell": MODEL},
            "build returned the key 'modell', which is not known; use model, optimizer",
        ),
        ({"model": "x"}, "build: model is a str, not a Module"),
        ((MODEL, "x"), "part 2 is a str, which is not a part of a run"),
        ((MODEL, abs, max), "part 3 is a builtin_function_or_method, a second loss_fn"),
        ({"model": MODEL, "optimizer": "x"}, "build: optimizer is a str, not a Optimizer"),
        ({"loss_fn": 3}, "build: loss_fn is a int; give a function of a batch"),
    ],
)
def test_unusable_result_of_a_build_function_is_one_clear_error(built: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        subject_of(built, "build")
    assert message in str(error.value)


def test_tuple_dict_and_subject_are_taken() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    assert subject_of((MODEL, optimizer, abs), "build") == Subject(
        model=MODEL, optimizer=optimizer, loss_fn=abs
    )
    assert subject_of({"model": MODEL}, "build") == subject_of(Subject(model=MODEL), "build")
    wrapped = type("AcceleratedOptimizer", (), {"optimizer": optimizer})()
    assert subject_of((MODEL, wrapped), "build").optimizer is optimizer


def test_each_part_of_a_tuple_is_known_by_what_it_is() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)))
    scaler = torch.amp.GradScaler("cpu")
    settings = stepguard.GuardConfig(clip_norm=0.5)
    assert subject_of((MODEL, optimizer, abs, loader), "build") == Subject(
        model=MODEL, optimizer=optimizer, loss_fn=abs, loader=loader
    )
    assert subject_of((MODEL, optimizer, loader, schedule, scaler, settings), "build") == Subject(
        model=MODEL,
        optimizer=optimizer,
        loader=loader,
        scheduler=schedule,
        scaler=scaler,
        guard=settings,
    )


@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_a_guard_is_taken_with_the_objects_it_was_made_for(in_a_tuple: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    settings = stepguard.GuardConfig(clip_norm=0.5, terminal="quiet")
    with stepguard.Guard(model, optimizer, scheduler=schedule, config=settings) as guard:
        subject = subject_of((model, guard) if in_a_tuple else guard, "build")
        assert subject == Subject(model=model, optimizer=optimizer, scheduler=schedule, guard=guard)
        result = check(subject, only=["checklist"])
    judged = {name: result.outcome(f"checklist.{name}") for name in ("clip", "recovery", "norms")}
    assert {outcome.status for outcome in judged.values()} == {"pass"}
    assert judged["clip"].evidence == ("GuardConfig.clip_norm=0.5",)
    assert "the returned `guard`" in judged["norms"].evidence[0]


def test_model_that_has_an_optimizer_of_its_own_is_a_model() -> None:
    model = nn.Linear(2, 2)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert subject_of((model, None), "build").model is model

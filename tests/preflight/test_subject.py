"""A Subject from whatever a build function returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepguard import ConfigError
from stepguard.preflight.subject import Subject, subject_of

MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, "build returned a NoneType; return (model, optimizer, loss_fn)"),
        ((1, 2), "build returned a tuple of 2"),
        (
            {"modell": MODEL},
            "build returned the key 'modell', which is not known; use model, optimizer",
        ),
        ({"model": "x"}, "build: model is a str, not a Module"),
        ((MODEL, "x"), "build: optimizer is a str, not a Optimizer"),
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


def test_model_that_has_an_optimizer_of_its_own_is_a_model() -> None:
    model = nn.Linear(2, 2)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert subject_of((model, None), "build").model is model

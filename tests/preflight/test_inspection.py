"""Facts about a subject: what is missing says what to give, and everything is measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stepguard import ConfigError
from stepguard.check.inspection import CheckContext, Inspection, NotApplicable, NotGiven
from stepguard.check.preflight import Subject
from stepguard.records.checks import Verification


def inspect(**parts: Any) -> Inspection:
    return Inspection(Subject(**parts), CheckContext(Path()))


@pytest.mark.parametrize(
    ("fact", "give"),
    [
        ("model", "whose function returns the model"),
        ("optimizer", "whose function returns the optimizer"),
        ("scheduler", "whose function returns the scheduler"),
        ("batch", "a batch, loader or dataset"),
        ("data", "give --data PATH"),
        ("validation", "give --validation PATH"),
        ("verified", "give --checkpoint PATH"),
        ("checkpoint", "give --checkpoint PATH"),
        ("probe", "whose function returns the model"),
    ],
)
def test_what_is_missing_says_what_to_give(fact: str, give: str) -> None:
    with pytest.raises(NotGiven, match=give):
        getattr(inspect(), fact)


def test_step_runs_once_for_all_items() -> None:
    calls = []

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        return model(batch).sum()

    model = nn.Linear(2, 1)
    run = inspect(model=model, loss_fn=loss_fn, batch=torch.ones(3, 2))
    assert run.traced_step is run.traced_step
    assert run.probe.dtype == "float32"
    assert len(calls) == 1


def test_exception_of_a_guessed_call_proves_nothing() -> None:
    with pytest.raises(NotGiven, match="return `loss_fn`; the model alone cannot be called"):
        _ = inspect(model=nn.Linear(2, 1), batch=torch.ones(3, 5)).traced_step


def test_meta_device_has_nothing_to_run() -> None:
    with pytest.raises(NotApplicable, match="meta device"):
        _ = inspect(model=nn.Linear(2, 1, device="meta"), batch=torch.ones(3, 2)).traced_step


def test_batch_of_a_dataset_has_the_configured_size() -> None:
    rows = [torch.full((2,), float(index)) for index in range(5)]
    assert inspect(dataset=rows, config={"batch_size": 3}).batch.shape == (3, 2)
    assert inspect(dataset=rows).batch.shape == (2, 2)
    assert inspect(loader=DataLoader(rows, batch_size=4)).batch.shape == (4, 2)  # type: ignore[arg-type]


def test_steps_are_given_or_configured() -> None:
    assert inspect(steps=5, config={"max_steps": 9}).steps == 5
    assert inspect(config={"max_steps": 9}).steps == 9
    assert inspect(config={"max_steps": -1}).steps is None


def test_switched_off_scaler_does_not_count() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert inspect(scaler=scaler).scaler is None
    assert inspect(scaler=torch.amp.GradScaler("cpu")).scaler is not None


def test_dtypes_are_sorted_by_their_share() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(9, 9))
    assert inspect(model=model).param_dtypes == {"float32": 90, "float16": 6}


def test_checkpoint_that_does_not_exist_is_an_error_and_a_verified_one_is_not_read() -> None:
    with pytest.raises(ConfigError, match=r"no\.pt does not exist"):
        _ = inspect(checkpoint="no.pt").verified
    known = Verification(path="no.pt", format="made up")
    assert Inspection(Subject(), CheckContext(Path()), verified=known).verified is known

"""A loss function with state of its own is named before hardware is blamed."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepguard import Guard

from .guarded import SKIPPING, code, evidence, first_incident, noise

Draw = Callable[[], float]


def counter() -> Draw:
    state = {"calls": 0}

    def draw() -> float:
        state["calls"] += 1
        return math.nan if state["calls"] == 2 else 1.0

    return draw


def nonlocal_counter() -> Draw:
    calls = 0

    def draw() -> float:
        nonlocal calls
        calls += 1
        return math.nan if calls == 2 else 1.0

    return draw


def list_of_calls() -> Draw:
    calls: list[int] = []

    def draw() -> float:
        calls.append(1)
        return math.nan if len(calls) == 2 else 1.0

    return draw


def iterator() -> Draw:
    numbers = itertools.count()
    return lambda: math.nan if next(numbers) == 1 else 1.0


def object_of_its_own() -> Draw:
    class Running:
        def __init__(self) -> None:
            self.mean, self.calls = torch.zeros(()), 0

        def __call__(self) -> float:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1
            return math.nan if self.calls == 2 else 1.0

    return Running()


def rare(uniform: Callable[[], float]) -> Draw:
    """Bad in the second call only, whatever is drawn: the draws differ all the same."""
    calls = itertools.count()
    return lambda: math.nan if next(calls) == 1 else 1.0 + uniform()


def torch_generator() -> Draw:
    own = torch.Generator().manual_seed(0)
    return rare(lambda: float(torch.rand((), generator=own)))


def numpy_generator() -> Draw:
    own = np.random.default_rng(0)
    return rare(lambda: float(own.random()))


def python_generator() -> Draw:
    own = random.Random(0)
    return rare(own.random)


KINDS = [counter, nonlocal_counter, list_of_calls, iterator, object_of_its_own]
KINDS += [torch_generator, numpy_generator, python_generator]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_impure_loss_function_is_named_before_hardware(make: Callable[[], Draw]) -> None:
    model, draw = nn.Linear(3, 1), make()
    incident = first_incident(model, lambda batch: model(batch).pow(2).mean() * draw(), noise)
    finding = incident.findings[0]
    assert (finding.code, incident.origin and incident.origin.reproduced) == ("SG702", False)
    assert "not a function of its batch" in finding.evidence[0]
    assert finding.certainty == "likely"


def test_losses_that_differ_show_it_where_no_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is outside the function's reach: in the environment of the process."""
    model = nn.Linear(3, 1)
    monkeypatch.setenv("STEPGUARD_TEST_CALLS", "0")

    def loss_fn(batch: Tensor) -> Tensor:
        calls = int(os.environ["STEPGUARD_TEST_CALLS"]) + 1
        os.environ["STEPGUARD_TEST_CALLS"] = str(calls)
        return model(batch).pow(2).mean() * (math.nan if calls == 2 else float(calls))

    incident = first_incident(model, loss_fn, noise)
    assert (
        incident.findings[0].evidence[0]
        == "not reproduced: the loss function is not a function of its batch"
    )
    assert "two replays of the same step give the losses" in evidence(incident)


def test_pure_loss_function_leaves_a_fault_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    monkeypatch.setenv("STEPGUARD_TEST_CALLS", "0")

    def loss_fn(batch: Tensor) -> Tensor:
        calls = int(os.environ["STEPGUARD_TEST_CALLS"]) + 1
        os.environ["STEPGUARD_TEST_CALLS"] = str(calls)
        return model(batch).pow(2).mean() * (math.nan if calls == 2 else 1.0)

    incident = first_incident(model, loss_fn, noise)
    assert code(incident) == "SG702"
    assert "the same bits each time" in evidence(incident)


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "after an incident"])
def test_replays_leave_the_loss_functions_own_generator_alone(bad: bool) -> None:
    """What is drawn after an incident is what would have been drawn without any replay."""
    own, drawn = torch.Generator().manual_seed(0), []
    model = nn.Linear(3, 1)

    def loss_fn(batch: Tensor) -> Tensor:
        drawn.append(float(torch.rand((), generator=own)))
        return model(batch).pow(2).mean() / (batch[0, 0] - batch[0, 0].detach() + 1.0)

    expected = torch.rand(4, generator=torch.Generator().manual_seed(0)).tolist()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), config=SKIPPING) as guard:
        for step in range(4):
            batch = noise(step)
            if bad and step == 1:
                batch[2, 0] = math.nan
            guard.step(loss_fn, batch)
        assert len(guard.incidents) == int(bad)
    assert drawn == pytest.approx(expected)


def test_chance_names_no_sample() -> None:
    """One draw in two is bad: leaving samples out says nothing then."""
    own = np.random.default_rng(3)
    model = nn.Linear(3, 1)

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).pow(2).mean() + torch.tensor(float(own.random() < 0.5)).log().abs()

    assert first_incident(model, loss_fn, noise, steps=20).origin.samples == ()  # type: ignore[union-attr]


def test_history_kept_for_logging_does_not_hide_the_sample() -> None:
    model = nn.Linear(3, 1)
    history: list[float] = []

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        each = model(batch["x"]).squeeze(-1).pow(2)
        history.append(float(each.detach().mean()))
        return (each / batch["scale"]).mean()

    def batch(step: int) -> dict[str, Tensor]:
        return {"x": noise(step), "scale": torch.tensor([1.5, 2.0, 1.0 - step, 1.0])}

    incident = first_incident(model, loss_fn, batch)
    assert incident.origin is not None
    assert (code(incident), incident.origin.samples, incident.origin.reproduced) == (
        "SG201",
        (2,),
        True,
    )
    assert len(history) == 2  # one entry a step: those of the replays are taken back

"""State outside the batch: numbers and tensors that modules keep, and loss functions that are not a
function of their batch."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stepguard
from stepguard import Guard
from stepguard.locate.replay import LossFunctionState

from .guarded import SKIPPING, code, evidence, first_incident, noise

NAN = math.nan
Expression = Callable[[nn.Module, Tensor, float], Tensor]

NUMBERS: dict[str, tuple[Expression, str, str]] = {
    "factor": (lambda model, x, w: model(x).mean() * w, "aten.mul", "other=nan"),
    "reflected": (lambda model, x, w: w - model(x).mean(), "aten.rsub", "other=nan"),
    "divisor": (lambda model, x, w: (model(x) / w).mean(), "aten.div", "other=nan"),
    "alpha": (
        lambda model, x, w: torch.add(model(x).mean(), model(x).sum(), alpha=w),
        "aten.add",
        "alpha=nan",
    ),
    "bound": (lambda model, x, w: model(x).clamp(min=w).mean(), "aten.clamp", "min=nan"),
    "filled": (
        lambda model, x, w: (model(x) * torch.full((4, 1), w)).mean(),
        "aten.full",
        "fill_value=nan",
    ),
    "exponent": (lambda model, x, w: model(x).abs().pow(w).mean(), "aten.pow", "exponent=nan"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_nan_number_is_named_with_its_argument(name: str) -> None:
    expression, op, said = NUMBERS[name]
    model = nn.Linear(3, 1)
    incident = first_incident(
        model,
        lambda batch: expression(model, batch["x"], batch["weight"]),
        lambda step: {"x": noise(step), "weight": NAN if step else 1.5},
    )
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.op, code(incident)) == ("loss", op, "SG101")
    assert f"was given the number {said}" in evidence(incident)


@pytest.mark.parametrize("op", ["aten.div", "aten.reciprocal"])
def test_number_read_from_a_tensor_leads_back_to_that_tensor(op: str) -> None:
    """(a / b).item() as a weight: the division is what went wrong, not a number from outside."""
    model = nn.Linear(3, 4, bias=False)

    def loss_fn(x: Tensor) -> Tensor:
        out = model(x)
        size = out[2].detach().abs().sum()
        weight = (out[2].detach().sum() / size if op == "aten.div" else 1 / size).item()
        return out.pow(2).mean() * weight

    def batch(step: int) -> Tensor:
        x = noise(step)
        x[2] *= 1 - step
        return x

    incident = first_incident(model, loss_fn, batch)
    assert incident.origin is not None
    assert (incident.origin.op, code(incident)) == (op, "SG201")


def test_infinite_weight_of_a_loss_is_named() -> None:
    model = nn.Linear(3, 1)
    incident = first_incident(
        model,
        lambda batch: (model(batch["x"]).pow(2) * batch["weight"]).mean(),
        lambda step: {"x": noise(step), "weight": math.inf if step else 1.0},
    )
    assert incident.origin is not None
    assert (incident.origin.op, code(incident)) == ("aten.mul", "SG101")
    assert "other=inf" in evidence(incident)


class Centred(nn.Module):
    """Keeps a centre, a list of centres and a temperature, none of them a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.center = torch.zeros(2)
        self.older = [torch.zeros(2), torch.zeros(2)]
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return (out - self.center - self.older[1]) / self.temperature


def poisoned(change: Callable[[Centred], None]) -> tuple[nn.Module, Callable[[int], Tensor]]:
    model = nn.ModuleDict({"head": Centred()})

    def batch(step: int) -> Tensor:
        if step == 1:
            change(model["head"])  # type: ignore[arg-type]
        return noise(step)

    return model, batch


def put_center(head: Centred) -> None:
    head.center = torch.tensor([0.0, NAN])


def put_older(head: Centred) -> None:
    head.older[1] = torch.tensor([NAN, 0.0])


@pytest.mark.parametrize(
    ("change", "name"), [(put_center, "self.center"), (put_older, "self.older[1]")]
)
def test_tensor_kept_outside_buffers_is_named_as_that_attribute(
    change: Callable[[Centred], None], name: str
) -> None:
    model, batch = poisoned(change)
    incident = first_incident(model, lambda x: model["head"](x).pow(2).mean(), batch)  # type: ignore[index]
    assert incident.origin is not None
    assert (incident.origin.phase, incident.origin.module, incident.origin.op) == (
        "state",
        "head",
        "aten.sub",
    )
    assert incident.origin.source is not None and incident.origin.tensor is None
    assert code(incident) == "SG602"
    assert f"`{name}` of module `head` was already non-finite" in evidence(incident)
    assert "outside its buffers" in evidence(incident)


def test_number_kept_by_a_module_is_named_as_that_attribute() -> None:
    model, batch = poisoned(lambda head: setattr(head, "temperature", NAN))
    incident = first_incident(model, lambda x: model["head"](x).pow(2).mean(), batch)  # type: ignore[index]
    assert code(incident) == "SG101"
    assert "the attribute `head.temperature` of the model is nan" in evidence(incident)


def test_tensor_of_the_loss_expression_stays_a_tensor_from_outside() -> None:
    model, weight = nn.Linear(3, 1), torch.ones(1)

    def batch(step: int) -> Tensor:
        weight.fill_(NAN if step else 1.0)
        return noise(step)

    incident = first_incident(model, lambda x: (model(x) * weight).mean(), batch)
    assert code(incident) == "SG101"
    assert "a tensor from outside model and batch" in evidence(incident)


def test_watched_loop_with_a_nan_number_is_placed_at_the_second_incident() -> None:
    """The loss expression is not part of the replay there; the step after next runs under the
    tracer.
    """
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with stepguard.watch(model, optimizer, config=stepguard.GuardConfig(terminal="quiet")) as guard:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(noise(step)).pow(2).mean() * (NAN if step in (1, 3) else 1.0)
            loss.backward()
            optimizer.step()
    first, second = guard.incidents
    assert first.origin is not None and any(
        "originated outside the model" in remark for remark in first.origin.remarks
    )
    assert second.origin is not None
    assert (second.origin.op, code(second)) == ("aten.mul", "SG101")
    assert "other=nan" in evidence(second)


# --- a loss function with state of its own is named before hardware
# --------------------------------------------------------------------------------------------------


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


# --- that state is found, compared and put back
# --------------------------------------------------------------------------------------------------


def test_changed_state_is_named_and_restored() -> None:
    state: dict[str, Any] = {"step": 3, "limit": math.nan, "seen": [1, 2]}
    own = LossFunctionState(lambda: state)
    state["step"] += 1
    state["seen"].append(3)
    assert own.changed() == ("the number `state['step']`", "the list `state['seen']`")
    own.restore()
    assert state["step"] == 3 and state["seen"] == [1, 2]
    assert own.changed() == ()


def test_nothing_is_put_back_while_another_thread_may_have_changed_it() -> None:
    state, done = {"next": 3}, threading.Event()
    own = LossFunctionState(lambda: state)
    other = threading.Thread(target=done.wait, name="prefetch")
    other.start()
    try:
        state["next"] += 1
        own.restore()
        assert state["next"] == 4
    finally:
        done.set()
        other.join()


GENERATORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item()),
    "python": (random.Random(1), lambda g: g.random()),
    "numpy": (np.random.default_rng(1), lambda g: g.random()),
    "old numpy": (np.random.RandomState(1), lambda g: g.rand()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_go_back_to_where_they_were(name: str) -> None:
    generator, draw = GENERATORS[name]
    state = LossFunctionState(lambda: generator)
    first = draw(generator)
    assert state.changed() == ("the generator `generator`",)
    state.restore()
    assert draw(generator) == first


def test_counter_is_named_although_it_cannot_be_put_back() -> None:
    counter = itertools.count()
    state = LossFunctionState(lambda: counter)
    next(counter)
    assert state.changed() == ("the counter `counter`",)


def test_tensor_changed_in_place_is_put_back_by_value_and_object() -> None:
    kept = {"center": torch.ones(3)}
    before = kept["center"]
    state = LossFunctionState(lambda: kept)
    before.mul_(2.0)
    kept["center"] = torch.zeros(3)
    state.restore()
    assert kept["center"] is before
    assert before.tolist() == [1.0, 1.0, 1.0]


class Scaled:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, batch: Any, factor: float = 1.0) -> float:
        self.calls += 1
        return factor


def test_attribute_of_a_bound_method_inside_a_partial_is_found() -> None:
    scaled = Scaled()
    state = LossFunctionState(functools.partial(scaled.loss, factor=2.0))
    scaled.loss(None)
    assert state.changed() == ("the number `self.calls`",)
    state.restore()
    assert scaled.calls == 0


def test_modules_are_left_to_the_step() -> None:
    model = torch.nn.BatchNorm1d(2)
    state = LossFunctionState(lambda: model)
    model.running_mean.add_(1.0)
    assert state.changed() == ()

"""Bad values that come in as Python numbers, or as tensors a module keeps outside its buffers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stepguard

from .guarded import code, evidence, first_incident, noise

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

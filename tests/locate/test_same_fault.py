"""A replay reproduces a step only if it goes bad in the same way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stepguard.locate.replay import kind

from .guarded import code, evidence, first_incident, noise


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "nan"), (math.inf, "+inf"), (-math.inf, "-inf"), (0.5, "finite")]
)
def test_kinds_of_a_loss(value: float, word: str) -> None:
    assert kind(value) == word


def test_minus_infinity_where_plus_infinity_was_seen_is_not_reproduced() -> None:
    model = nn.Linear(3, 1)
    signs: list[float] = []

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        signs.append(1.0)
        return squares(model, batch["x"]) / batch["below"] * (-1.0) ** len(signs)

    incident = first_incident(
        model, loss_fn, lambda step: {"x": noise(step), "below": torch.tensor(1.0 - step)}
    )
    assert incident.origin is not None
    assert incident.origin.reproduced is False
    said = next(finding for finding in incident.findings if finding.code == "SG702")
    assert "the loss was +inf and the replay gives -inf" in " ".join(said.evidence)


def test_infinity_where_nan_was_seen_is_not_reproduced() -> None:
    model = nn.Linear(3, 1)
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> Tensor:
        calls.append(1)
        return squares(model, batch) * (
            math.nan if len(calls) == 2 else math.inf if len(calls) > 2 else 1.0
        )

    incident = first_incident(model, loss_fn, noise)
    assert incident.origin is not None and incident.origin.reproduced is False


def test_another_part_of_the_loss_is_not_the_same_fault() -> None:
    model = nn.Linear(3, 1)
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        one, other = squares(model, batch), model(batch).abs().mean()
        bad = torch.tensor(math.inf)
        return {
            "one": one * bad if len(calls) == 2 else one,
            "other": other * bad if len(calls) > 2 else other,
        }

    incident = first_incident(model, loss_fn, noise)
    assert incident.origin is not None and incident.origin.reproduced is False
    assert "the loss part 'one' was +inf" in (incident.origin.evidence.departs or "")


def test_another_gradient_is_not_the_same_fault() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 1, bias=False), "b": nn.Linear(3, 1, bias=False)})
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> Tensor:
        calls.append(1)
        broken = "a" if len(calls) == 2 else "b"
        total = squares(model["a"], batch) + squares(model["b"], batch)
        if len(calls) > 1:
            total = total + (model[broken].weight * 0).sum().sqrt()
        return total

    incident = first_incident(model, loss_fn, noise)
    assert incident.origin is not None and incident.origin.reproduced is False
    assert "the gradient of a.weight was non-finite" in (incident.origin.evidence.departs or "")


def test_same_infinity_is_reproduced() -> None:
    model = nn.Linear(3, 1)
    incident = first_incident(
        model,
        lambda batch: -squares(model, batch["x"]) / batch["below"],
        lambda step: {"x": noise(step), "below": torch.tensor(1.0 - step)},
    )
    assert incident.origin is not None and incident.origin.reproduced is True
    assert code(incident) == "SG201", evidence(incident)

"""Causes are true under every driver: what was computed is no input, finite garbage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.opaque import DRIVERS, driven
from torch import Tensor, nn

from stepguard.records import Incident

HERE = Path(__file__)
drivers = pytest.mark.parametrize("driver", DRIVERS)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Other tests compile in this process, and a process with compiled code is not traced."""
    torch._dynamo.utils.counters.clear()


def explained(incidents: list[Incident]) -> Incident:
    """The first incident with a cause: a watched loop is traced after the first bad step."""
    return next(incident for incident in incidents if incident.findings)


@drivers
def test_value_computed_before_the_model_is_not_an_input(driver: str) -> None:
    model = nn.Linear(3, 3)

    def loss_fn(x: Tensor) -> Tensor:
        signal = (x[:, :1] > 0).float()
        ratio = signal / (1 - signal)  # divided
        weight = ratio / (ratio + 1)
        return (weight * model(x)).square().mean()

    incident = explained(driven(driver, model, loss_fn, (torch.randn(8, 3) for _ in range(4))))
    number = next(
        n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith("# divided")
    )
    origin, finding = incident.origin, incident.findings[0]
    assert origin is not None and origin.source is not None
    assert (origin.phase, origin.op, origin.module) == ("loss", "aten.div", None)
    assert origin.source.endswith(f"{HERE.name}:{number}")
    assert (finding.code, finding.certainty) == ("SG201", "certain")
    assert "SG101" not in [other.code for other in incident.findings]


class Rotary(nn.Module):
    """A buffer that nobody filled: `inv_freq` after `empty_like`."""

    inv_freq: Tensor
    mask: Tensor

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1e-38, largest, 1.0, 4e-30]))
        # A sentinel, which is not garbage.
        self.register_buffer("mask", torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x * self.inv_freq) * (x + self.mask).softmax(-1)


class Model(nn.Module):
    def __init__(self, largest: float) -> None:
        super().__init__()
        self.inner, self.rotary, self.head = nn.Linear(4, 4), Rotary(largest), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rotary(self.inner(x)))
        return out


@drivers
def test_finite_garbage_in_a_buffer_is_named_when_the_norm_overflows(driver: str) -> None:
    model = Model(3.2e21)

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    incident = driven(driver, model, loss_fn, [torch.randn(8, 4)])[0]
    assert incident.verdict.kind == "infinite_norm" and incident.origin is not None
    assert (incident.origin.tensor, incident.origin.module) == ("buffer:rotary.inv_freq", "rotary")
    first = incident.findings[0]
    assert (first.code, first.certainty) == ("SG602", "likely")
    assert (
        "`buffer:rotary.inv_freq` is finite but absurdly large, up to 3.2e+21" in first.evidence[0]
    )


@drivers
def test_norm_that_overflows_by_a_factor_of_the_loss_blames_no_buffer(driver: str) -> None:
    model = Model(1.0)

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) - x.sum(1, keepdim=True)).square().mean() * 1e22

    incident = driven(driver, model, loss_fn, [torch.randn(8, 4)])[0]
    assert incident.origin is not None and incident.origin.tensor is None
    assert incident.findings[0].code == "SG501"


def test_finite_garbage_in_a_buffer_is_named_when_the_forward_overflows() -> None:
    model = Model(3.2e21)

    def loss_fn(x: Tensor) -> Tensor:
        return (model.inner(x) * model.rotary.inv_freq).square().mean()

    incident = driven("step", model, loss_fn, [torch.randn(8, 4)])[0]
    assert incident.origin is not None and incident.origin.op == "aten.pow"
    assert incident.origin.evidence.huge_buffer == "buffer:rotary.inv_freq"
    assert "SG602" in [finding.code for finding in incident.findings]

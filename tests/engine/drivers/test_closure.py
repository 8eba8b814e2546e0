"""Optimizers that are not torch's own: small models are checked at once, large ones where a
gradient is 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepguard
from scenes import Batch, batches, plain_net, quiet
from stepguard import Guard
from stepguard.sentinel.gradients import CHEAP_COPY, risky_update

DATA = batches(6)


STEEP = 3.0


class RootOfStatistics(torch.optim.Optimizer):
    """Scales the gradient by a root of a running mean, which a steep gradient pushes below 0."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.power, self.ends = -0.25, threading.Event()  # on itself, and one that cannot be copied

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            mean = self.state[p].setdefault("mean", torch.ones_like(p))
            mean.mul_(0.9).add_(p.grad.square(), alpha=0.1)
            rounded = mean - 2 * mean.max() if p.grad.norm() > STEEP else mean
            p.sub_(0.01 * p.grad * rounded.pow(self.power))


def _loss(model: nn.Module, weight: float = 1.0) -> Callable[[Batch], Tensor]:
    return lambda b: weight * F.cross_entropy(model(b[0]), b[1])


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("last", [2, 5])
def test_update_that_breaks_by_itself_is_undone_at_its_step_even_if_it_is_the_last(
    watched: bool, last: int
) -> None:
    torch.manual_seed(0)
    model = plain_net()
    optimizer = RootOfStatistics(model.parameters())
    with (stepguard.watch if watched else Guard)(
        model, optimizer, config=quiet(locate=True)
    ) as guard:
        for step, batch in enumerate(DATA[: last + 1]):
            loss = _loss(model, 100.0 if step == 2 else 1.0)
            if watched:
                optimizer.zero_grad()
                loss(batch).backward()
                optimizer.step()
            else:
                guard.step(loss, batch)
    (incident,) = guard.incidents
    assert incident.step == 2 and incident.origin is not None
    assert (incident.origin.phase, incident.origin.op) == ("optimizer", "aten.pow")
    assert incident.findings[0].code == "SG207"
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_huge_weights_whose_norm_overflows_are_no_incident() -> None:
    model = plain_net()
    optimizer = RootOfStatistics(model.parameters())
    unused = nn.Parameter(torch.full((3,), 3e38))
    optimizer.param_groups[0]["params"].append(unused)
    with Guard(model, optimizer, config=quiet()) as guard:
        for batch in DATA:
            guard.step(_loss(model), batch)
    assert guard.incidents == ()
    assert torch.equal(unused, torch.full((3,), 3e38))


@pytest.mark.parametrize(
    ("count", "least_norm", "risky"), [(8, 1.0, True), (CHEAP_COPY + 1, 1.0, False)]
)
def test_copy_is_taken_where_it_costs_next_to_nothing(
    count: int, least_norm: float, risky: bool
) -> None:
    own = RootOfStatistics([nn.Parameter(torch.zeros(count))])
    assert risky_update(own, (0.01,), least_norm) is risky
    assert risky_update(own, (0.01,), 0.0)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(count))], lr=0.01)
    assert not risky_update(theirs, (0.01,), least_norm)


class Turns(torch.optim.Optimizer):
    """Divides by the gradient itself, which is 0 where the batch is."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.01 * p.grad / p.grad)


def test_complex_weights_that_break_in_the_update_are_undone_too() -> None:
    model = nn.Module()
    model.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with Guard(model, Turns(model.parameters()), config=quiet()) as guard:
        for step in range(3):
            x = torch.tensor([1.0, 2.0, 0.0 if step == 1 else 3.0])
            guard.step(lambda b: (model.turn * b).abs().square().sum(), x)
    assert [incident.step for incident in guard.incidents] == [1]
    assert bool(torch.view_as_real(model.turn.detach()).isfinite().all())


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(24, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.items(ids))


def _run_of_rows(hurt: Callable[[Towers], None], steps: int = 60) -> tuple[Any, ...]:
    """Batches 0 to 29 and 31 on use rows 0 to 11, batch 30 uses the others too; `hurt` runs just
    before it.
    """
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Guard(model, optimizer, config=quiet(snapshot_every=4)) as guard:
        for step in range(steps):
            ids = torch.arange(12) + (12 if step in (5, 30) else 0)
            if step == 30:
                hurt(model)
            guard.step(lambda b: F.mse_loss(model(b), torch.ones(12, 1)), ids)
            if guard.incidents:
                break
    return tuple(guard.incidents)


def test_weights_that_only_one_batch_uses_are_told_once_they_have_hurt_the_rest() -> None:
    def hurt(model: Towers) -> None:
        model.items.weight.data[12:] += 300.0

    (incident,) = _run_of_rows(hurt)
    assert (incident.step, incident.verdict.kind) == (31, "spike")
    assert "the last update changed the weights" in incident.verdict.summary
    assert incident.decision is not None and incident.decision.action == "note"


def test_batch_that_is_hard_for_all_weights_is_no_incident() -> None:
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(snapshot_every=4)) as guard:
        for step in range(40):
            target = torch.full((12, 1), 30.0 if step == 30 else 1.0)
            guard.step(lambda b: F.mse_loss(model(b[0]), b[1]), (torch.arange(12), target))
    assert guard.incidents == ()

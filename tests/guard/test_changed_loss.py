"""Losses that rise by intention: another term, a reward, a penalty that begins at 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepguard
from guard.scenes import Batch, batches, plain_net, quiet
from stepguard import Guard, Incident
from stepguard.sentinel.gradients import gradient_norm

STEPS, SWITCH = 60, 30
DATA = batches(STEPS, size=8)


def train(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    loss: object,
    *,
    guarded: bool,
    anomalies: Any = "act",
) -> list[Incident]:
    """Every step once; `loss` is called with the batch and the number of the step."""
    now = [0]

    def loss_fn(batch: Batch) -> Tensor:
        return loss(batch, now[0])  # type: ignore[operator]

    if guarded:
        with Guard(model, optimizer, config=quiet(snapshot_every=5, anomalies=anomalies)) as guard:
            for now[0], batch in enumerate(DATA):
                guard.step(loss_fn, batch)
            return list(guard.incidents)
    for now[0], batch in enumerate(DATA):
        optimizer.zero_grad()
        loss_fn(batch).backward()
        optimizer.step()
    return []


def run_of_two_terms(*, guarded: bool) -> tuple[list[Incident], list[Tensor]]:
    torch.manual_seed(0)
    model = plain_net()

    def loss(batch: Batch, step: int) -> Tensor:
        scores = model(batch[0])
        first = F.cross_entropy(scores, batch[1])
        return first + (50.0 + scores.pow(2).mean() if step >= SWITCH else 0.0)

    found = train(torch.optim.SGD(model.parameters(), lr=0.01), model, loss, guarded=guarded)
    return found, [p.detach().clone() for p in model.parameters()]


def test_second_term_that_is_switched_on_is_no_incident_and_changes_nothing() -> None:
    found, weights = run_of_two_terms(guarded=True)
    assert found == []
    assert all(map(torch.equal, weights, run_of_two_terms(guarded=False)[1]))


def test_weights_that_are_hurt_while_the_loss_stays_the_same_are_still_an_incident() -> None:
    torch.manual_seed(0)
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(snapshot_every=5, anomalies="act")) as guard:
        for step, batch in enumerate(DATA):
            if step == SWITCH:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(-60.0)
            guard.step(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
            if guard.incidents:
                break
    assert [(i.step, i.verdict.kind) for i in guard.incidents] == [(SWITCH + 2, "spike")]


def test_reward_that_rises_is_what_was_asked_for() -> None:
    torch.manual_seed(0)
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)

    def reward(batch: Batch, step: int) -> Tensor:
        return 1e-3 - 1e-3 * F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * step**2

    assert train(optimizer, model, reward, guarded=True) == []


def test_penalty_that_begins_at_zero_is_no_spike() -> None:
    torch.manual_seed(0)
    model = plain_net()
    start = [p.detach().clone() for p in model.parameters()]

    def penalty(batch: Batch, step: int) -> Tensor:
        away = sum((p - s).pow(2).sum() for p, s in zip(model.parameters(), start, strict=True))
        assert isinstance(away, Tensor)
        score = model(batch[0]).sum()
        return away + score - score.detach()

    assert train(torch.optim.SGD(model.parameters(), lr=1e-3), model, penalty, guarded=True) == []


class TrustRatio(torch.optim.Optimizer):
    """Scales the step by the norm of the weights over that of their gradient, no epsilon."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.01})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.norm() / p.grad.norm()) * p.grad)


@pytest.mark.parametrize("watched", [False, True])
def test_hand_written_update_of_a_zero_gradient_is_undone_and_named(watched: bool) -> None:
    torch.manual_seed(0)
    model = plain_net()
    optimizer = TrustRatio(model.parameters())
    make = stepguard.watch if watched else Guard
    with make(model, optimizer, config=quiet(locate=True)) as guard:
        for step, batch in enumerate(DATA[:4]):
            weight = 0.0 if step == 2 else 1.0

            def loss_fn(b: Batch, weight: float = weight) -> Tensor:
                return weight * F.cross_entropy(model(b[0]), b[1])

            if watched:
                optimizer.zero_grad()
                loss_fn(batch).backward()
                optimizer.step()
            else:
                guard.step(loss_fn, batch)
    (incident,) = guard.incidents
    assert incident.step == 2 and incident.verdict.kind == "nonfinite_parameter"
    assert incident.origin is not None and (incident.origin.phase, incident.origin.op) == (
        "optimizer",
        "aten.div",
    )
    assert [finding.code for finding in incident.findings] == ["SG201", "SG502"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_norm_of_each_gradient_leaves_the_total_as_torch_has_it() -> None:
    grads = [torch.randn(5, 3), torch.randn(7), torch.zeros(2)]
    found = gradient_norm(grads, each=True)
    assert found is not None and found.least is not None
    assert torch.equal(found.total, torch.nn.utils.get_total_norm(grads))
    assert float(found.least) == 0.0

"""Losses that rise by intention: another term, a reward, a penalty that begins at 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.parts import step_of
from scenes import Batch, batches, plain_net, quiet
from stepguard import Guard, Incident
from stepguard.engine.incident.anomaly_check import TOLD_FOR, AnomalyCheck
from stepguard.records import Reading, Verdict

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


def test_second_term_that_is_switched_on_is_not_an_incident_and_changes_nothing() -> None:
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


def test_penalty_that_begins_at_zero_is_not_a_spike() -> None:
    torch.manual_seed(0)
    model = plain_net()
    start = [p.detach().clone() for p in model.parameters()]

    def penalty(batch: Batch, step: int) -> Tensor:
        away = sum((p - s).pow(2).sum() for p, s in zip(model.parameters(), start, strict=True))
        assert isinstance(away, Tensor)
        score = model(batch[0]).sum()
        return away + score - score.detach()

    assert train(torch.optim.SGD(model.parameters(), lr=1e-3), model, penalty, guarded=True) == []


def test_runaway_loss_is_told_once_and_then_only_noted() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet()) as guard:
        check = AnomalyCheck(guard._context, guard._rewinder, clips_itself=True)
        runaway = Verdict(kind="spike", severity="incident", summary="high")
        severities = []
        for step in (10, 11, 10 + TOLD_FOR):
            reading = Reading(step=step, loss=1e9)
            _, verdict = check.weigh(step_of(DATA[0]), reading, runaway)
            severities.append(verdict.severity)
    assert severities == ["incident", "note", "incident"]


def test_earlier_batch_is_evaluated_on_the_present_weights() -> None:
    model = plain_net()
    for maximize, sign in ((False, 1.0), (True, -1.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=maximize)
        with Guard(model, optimizer, config=quiet()) as guard:
            check = AnomalyCheck(guard._context, guard._rewinder, clips_itself=True)
            assert check.earlier_batch_now() is None
            guard._context.memory.anchor = (step_of(DATA[0], model=model), 0.25)
            now = F.cross_entropy(model(DATA[0][0]), DATA[0][1]).item()
            assert check.earlier_batch_now() == (sign * now, 0.25)

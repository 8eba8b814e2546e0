"""Steps are run again as the decision says: one step, all since, or all in another order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.parts import incident_of, step_of
from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.recover.rewind import run_again
from stepguard.engine.recover.snapshots import KeptStep
from stepguard.engine.result import StepResult
from stepguard.records import Action, Decision, Incident, Reading

DATA = batches(6)


class Driver:
    """Notes the batches that are run again instead of training on them."""

    def __init__(self, guard: Guard) -> None:
        self.context = guard._context
        self.rewinder = guard._rewinder
        self.ran: list[Any] = []
        self.losses: list[float] = []
        self.numbers: list[float] = []

    def run(self, loss_fn: Any, micro_batches: tuple[Any, ...]) -> StepResult:
        self.ran.append(micro_batches[0])
        self.numbers.append(torch.rand(()).item())
        loss = self.losses.pop(0) if self.losses else 1.0
        return StepResult().resolve(Reading(step=self.context.step, loss=loss), committed=True)


@pytest.fixture
def driver() -> Iterator[Driver]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(snapshot_every=1000)) as guard:
        made = Driver(guard)
        guard._context.step = 1
        made.rewinder.start = made.rewinder.snapshots.take()
        for index in (1, 2, 3):
            step = step_of(DATA[index], index=index)
            made.rewinder.left.append(KeptStep(step, 1.0, 0, [], []))
        yield made


def _decided(action: Action, data: str | None = None) -> Incident:
    return incident_of(decision=Decision(action=action, data=data))


def _order(driver: Driver) -> list[int]:
    return [next(i for i, batch in enumerate(DATA) if batch is ran) for ran in driver.ran]


def test_retry_runs_the_step_once_with_the_random_numbers_it_had(driver: Driver) -> None:
    torch.manual_seed(5)
    step = step_of(DATA[4], index=4)
    expected = torch.rand(()).item()
    incident = _decided("retry")
    result = run_again(driver, step, incident)
    assert result is not None and result.incident is incident
    assert driver.numbers == [expected]
    assert _order(driver) == [4]
    assert driver.rewinder.retried == 4


def test_late_rerun_leaves_the_loops_random_numbers_alone(driver: Driver) -> None:
    step = step_of(DATA[4], index=4)
    torch.manual_seed(9)
    expected = torch.rand(()).item()
    torch.manual_seed(9)
    run_again(driver, step, _decided("retry"), late=True)
    assert torch.rand(()).item() == expected


def test_repeat_runs_the_steps_since_in_order_and_then_the_bad_one(driver: Driver) -> None:
    result = run_again(driver, step_of(DATA[4], index=4), _decided("rewind", "repeat"))
    assert result is not None
    assert _order(driver) == [1, 2, 3, 4]


def test_repeat_that_gives_another_loss_is_undone(driver: Driver) -> None:
    driver.losses = [1.0, 1.5]
    assert run_again(driver, step_of(DATA[4], index=4), _decided("rewind", "repeat")) is None
    assert _order(driver) == [1, 2]
    assert driver.context.step == 1


@pytest.mark.parametrize("decided", [None, _decided("skip"), _decided("rewind", "skip")])
def test_nothing_is_run_where_the_decision_asks_for_nothing(
    driver: Driver, decided: Incident | None
) -> None:
    assert run_again(driver, step_of(DATA[4], index=4), decided) is None
    assert driver.ran == []

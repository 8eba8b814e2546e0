"""A rewind is planned among sound states, and no plan is handed out twice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.recover.rewind import RewindPlanner
from stepguard.judge.decide import NOTHING_GOOD, RewindPlan
from stepguard.state.run_state import SavedState

DATA = batches(8)


@pytest.fixture
def guard() -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(probation=2, snapshot_every=1000)) as made:
        yield made


def _planner(guard: Guard) -> RewindPlanner:
    return guard._rewinder.planner


def _plan(guard: Guard, **how: bool) -> tuple[RewindPlan | None, str]:
    planner = _planner(guard)
    while True:
        planner.chosen, why_not = planner.plan([planner.offer()], **how)
        plan = planner.chosen
        if plan is None or plan.target.kind == "snapshot" or planner.fetch(plan)["there"]:
            return plan, why_not
        planner.tried.append(plan)


def _snapshot_at(guard: Guard, step: int) -> None:
    guard._context.step = step
    assert guard._rewinder.snapshots.take() is not None


def _planned(guard: Guard, *, visible: bool = True, transient: bool = False) -> int | None:
    plan, _ = _plan(guard, transient=transient, visible=visible)
    return None if plan is None else plan.target.step


def test_nothing_to_go_back_to_is_said(guard: Guard) -> None:
    assert _plan(guard, transient=False, visible=True) == (None, NOTHING_GOOD)


def test_visible_damage_goes_to_the_newest_sound_snapshot_whatever_its_standing(
    guard: Guard,
) -> None:
    _snapshot_at(guard, 4)
    guard._rewinder.probation.commit(6)
    with torch.no_grad():
        next(iter(guard._context.model.parameters()))[0, 0] = math.inf
    _snapshot_at(guard, 8)
    assert _planned(guard) == 4


def test_plan_that_was_taken_is_not_made_again(guard: Guard) -> None:
    _snapshot_at(guard, 4)
    _snapshot_at(guard, 8)
    taken = []
    while _planned(guard) is not None:
        plan, snapshot = _planner(guard).take()
        taken.append((plan.target.step, snapshot.step))
    assert taken == [(8, 8), (4, 4)]
    _, why_not = _plan(guard, transient=False, visible=True)
    assert why_not.startswith("every rewind has been tried at step 8, 4")
    _planner(guard).forget()
    assert _planned(guard) == 8


def test_steps_that_can_be_repeated_are_repeated_first_after_a_transient_fault(
    guard: Guard,
) -> None:
    _snapshot_at(guard, 4)
    plan, _ = _plan(guard, transient=True, visible=True)
    assert plan is not None and plan.data == "repeat"


def test_checkpoint_is_read_before_it_is_counted_on(guard: Guard) -> None:
    state = guard._rewinder.snapshots.present()
    read: list[int] = []

    class Disk:
        def steps(self) -> list[int]:
            return [2, 6]

        def read(self, step: int) -> SavedState | None:
            read.append(step)
            return state if step == 2 else None

    _planner(guard).archive = Disk()
    plan, _ = _plan(guard, transient=False, visible=True)
    assert plan is not None and (plan.target.step, plan.target.kind) == (2, "checkpoint")
    assert read == [6, 2]
    assert _planner(guard).take()[1].state is state

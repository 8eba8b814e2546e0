"""Steps are kept by reference, within a budget, and only while their batches are untouched."""

from __future__ import annotations

import pytest
import torch

from engine.parts import step_of
from scenes import batches
from stepguard.engine.recover.snapshots import MOST_STEPS, RANDOM_NUMBERS, KeptSteps

DATA = batches(6)
SIZE = RANDOM_NUMBERS + DATA[0][0].nbytes + DATA[0][1].nbytes


def _filled(limit: int, count: int = 6) -> KeptSteps:
    kept = KeptSteps(limit)
    for index in range(count):
        kept.keep(step_of(DATA[index], index=index), float(index))
    return kept


def _indices(kept: KeptSteps, since: int) -> list[int] | None:
    found = kept.since(since)
    return None if found is None else [each.step.index for each in found]


def test_steps_since_a_snapshot_come_in_order() -> None:
    assert _indices(_filled(100 * SIZE), 2) == [2, 3, 4, 5]


def test_oldest_steps_are_dropped_beyond_the_limit_and_then_nothing_older_can_be_repeated() -> None:
    kept = _filled(3 * SIZE)
    assert _indices(kept, 3) == [3, 4, 5]
    assert _indices(kept, 2) is None


@pytest.mark.slow
def test_number_of_steps_is_bounded_whatever_the_limit() -> None:
    kept = KeptSteps(10**12)
    for index in range(MOST_STEPS + 3):
        kept.keep(step_of(DATA[0], index=index), 0.0)
    assert kept.at(2) is None and kept.at(3) is not None


def test_batch_that_was_written_to_cannot_be_repeated() -> None:
    batch = (DATA[0][0].clone(), DATA[0][1])
    kept = KeptSteps(10 * SIZE)
    kept.keep(step_of(batch, index=0), 1.0)
    assert kept.at(0) is not None
    batch[0].add_(1.0)
    assert kept.at(0) is None and kept.since(0) is None


def test_step_without_a_loss_function_breaks_the_row() -> None:
    kept = _filled(100 * SIZE, count=3)
    kept.keep(step_of(DATA[3], index=3, loss_fn=None), 1.0)
    assert _indices(kept, 2) is None
    assert _indices(kept, 4) == []


def test_steps_that_a_rewind_takes_back_are_handed_out_once() -> None:
    kept = _filled(100 * SIZE)
    assert [each.step.index for each in kept.take_since(4)] == [4, 5]
    assert _indices(kept, 2) == [2, 3]


def test_loss_that_differs_by_the_order_of_additions_only_is_the_same() -> None:
    kept = KeptSteps(10 * SIZE)
    kept.keep(step_of(DATA[0], index=0), 2.0)
    step = kept.at(0)
    assert step is not None
    assert step.same(2.0 * (1 + 1e-6)) and not step.same(2.1) and not step.same(None)


def test_forgotten_steps_free_their_room() -> None:
    kept = _filled(3 * SIZE, count=3)
    kept.forget_before(2)
    for index in (3, 4):
        kept.keep(step_of(DATA[index], index=index), 0.0)
    assert _indices(kept, 2) == [2, 3, 4]
    assert torch.equal(kept.at(2).step.micro_batches[0][0], DATA[2][0])  # type: ignore[union-attr]

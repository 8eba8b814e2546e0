"""A bad step goes on without what is proven guilty, and only without that."""

from __future__ import annotations

import math

import torch

from engine.parts import incident_of, origin_of, step_of
from scenes import batches, poisoned
from stepguard.engine.recover.rewind import (
    good_micro_batches,
    proven_guilty,
    share_of,
    without_samples,
)
from stepguard.records import Incident, Reading

DATA = batches(4)


def _guilty_samples(*samples: int, micro_batch: int | None = None) -> Incident:
    return incident_of(origin=origin_of(samples=samples, micro_batch=micro_batch))


def _guilty_micro_batches(*numbers: int, of: int) -> Incident:
    losses = tuple(math.nan if number in numbers else 1.0 for number in range(of))
    return incident_of(reading=Reading(step=0, loss=math.nan, micro_losses=losses))


def test_words_count_samples_from_0_and_micro_batches_from_1() -> None:
    one = step_of(DATA[0])
    two = step_of(DATA[0], DATA[1])
    assert proven_guilty(one, _guilty_samples(2)) == "sample 2"
    assert proven_guilty(two, _guilty_samples(0, 3, micro_batch=1)) == (
        "samples 0, 3 of micro-batch 2 of 2"
    )
    assert proven_guilty(two, _guilty_micro_batches(0, of=2)) == "micro-batch 1 of 2"
    assert (
        proven_guilty(step_of(*DATA), _guilty_micro_batches(0, 2, of=4))
        == "micro-batches 1, 3 of 4"
    )


def test_nothing_smaller_than_the_step_is_guilty_where_all_of_it_is() -> None:
    one = step_of(DATA[0])
    assert proven_guilty(one, _guilty_samples(0, 1, 2, 3)) == ""
    assert proven_guilty(one, _guilty_micro_batches(0, of=1)) == ""
    damaged = incident_of(
        reading=Reading(step=0, bad_state=("param:0.weight",)), origin=origin_of(samples=(1,))
    )
    assert proven_guilty(one, damaged) == ""


def test_share_is_that_of_the_samples_that_are_lost() -> None:
    step = step_of(DATA[0], DATA[1])
    assert share_of(step, _guilty_samples(2)) == 1 / 8
    assert share_of(step, _guilty_micro_batches(1, of=2)) == 1 / 2


def test_step_without_its_guilty_row_keeps_the_others_as_they_were() -> None:
    bad = poisoned(DATA[0])
    step = step_of(bad)
    rest = without_samples(step, _guilty_samples(0))
    assert rest is not None
    assert torch.equal(rest.micro_batches[0][0], bad[0][1:])
    assert step.micro_batches[0] is bad


def test_step_that_is_still_not_finite_without_the_row_is_not_used() -> None:
    assert without_samples(step_of(poisoned(DATA[0])), _guilty_samples(1)) is None
    assert without_samples(step_of(DATA[0]), incident_of()) is None


def test_good_micro_batches_are_those_that_are_finite_on_their_own() -> None:
    assert good_micro_batches(step_of(DATA[0], poisoned(DATA[1]), DATA[2])) == [0, 2]


def test_loss_function_that_refuses_a_batch_makes_no_good_micro_batch() -> None:
    def refuses(batch: object) -> torch.Tensor:
        raise ValueError("two samples at least")

    assert good_micro_batches(step_of(DATA[0], loss_fn=refuses)) == []

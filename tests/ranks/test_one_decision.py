"""Ranks go on with the reading of the one that made the bad value."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from engine.parts import step_of
from scenes import batches, poisoned
from stepguard.ranks.one_decision import OneDecision, RankReading, blamed_ranks, own_trouble
from stepguard.records import Reading

DATA = batches(2)
BAD_GRADIENT = Reading(step=0, loss=1.0, grads_finite=False)


@pytest.mark.parametrize(
    ("fields", "trouble"),
    [
        ({}, 0),
        ({"loss": math.nan, "micro_losses": (math.nan,)}, 2),
        ({"bad_state": ("param:w",)}, 4),
        ({"bad_inputs": ("batch:0",)}, 3),
        ({"grads_finite": False, "overflow": True}, 0),
    ],
)
def test_trouble_of_its_own_is_read_off_where_the_reading_names_it(
    fields: dict[str, Any], trouble: int
) -> None:
    assert own_trouble(step_of(DATA[0]), Reading(step=0, **fields)) == trouble


def test_replay_tells_whose_gradients_were_exchanged() -> None:
    assert own_trouble(step_of(DATA[0]), BAD_GRADIENT) == 0
    assert own_trouble(step_of(poisoned(DATA[0])), BAD_GRADIENT) == 2
    assert own_trouble(step_of(DATA[0], loss_fn=None), BAD_GRADIENT) == 1


@pytest.mark.parametrize(
    ("troubles", "spreads", "bad"),
    [
        ((0, 1), False, []),  # the rank that holds the bad part need not have made it
        ((2, 4), False, [1]),  # a bad shard spoils the loss of every rank
        ((2, 3), False, [1, 0]),  # two causes
        ((2, 3), True, [1]),  # ranks compute one batch together
    ],
)
def test_ranks_of_a_sharded_model_are_blamed_for_what_they_made(
    troubles: tuple[int, ...], spreads: bool, bad: list[int]
) -> None:
    assert blamed_ranks(troubles, sharded=True, spreads=spreads) == bad


@pytest.mark.parametrize(
    ("troubles", "bad", "chosen"),
    [
        ((0, 2, 1), (1,), 1),
        ((0, 0, 0), (), 0),
        ((1, 1), (), 0),  # averaged gradients: any rank may have made them
        ((0, 1), (1,), 1),
        ((2, 2), (0, 1), 0),
        ((2, 3, 0), (1, 0), 1),  # a bad stage makes the losses of other ranks bad
    ],
)
def test_worst_rank_speaks_for_all(
    troubles: tuple[int, ...], bad: tuple[int, ...], chosen: int
) -> None:
    told = []
    for rank, trouble in enumerate(troubles):
        reading = Reading(step=0, loss=float(rank))
        told.append({"read": RankReading(reading=reading, trouble=trouble)})

    def together(look: Any, what: str) -> list[dict[str, Any]]:
        assert look()["read"].reading.loss == 9.0
        return told

    agreement: Any = SimpleNamespace(together=together, members=tuple(range(len(troubles))))
    own = Reading(step=0, loss=9.0)
    agreed, faults = OneDecision(agreement, []).reading(step_of(DATA[0]), own, lambda: own, list)
    assert agreed.bad_ranks == bad and faults == []
    assert agreed.loss == float(chosen)

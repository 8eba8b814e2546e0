"""What ranks agree on: one reading, one decision, one stop, one saved state."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engine.parts import step_of
from scenes import batches, poisoned
from stepguard._errors import StoreError
from stepguard.ranks import agreement
from stepguard.ranks.agreement import Agreement, Meeting, RankAbsent
from stepguard.ranks.hung import AgreedStop
from stepguard.ranks.one_decision import OneDecision, RankReading, blamed_ranks, own_trouble
from stepguard.ranks.saving import refuse_other_size, state_of_rank
from stepguard.records import Reading
from stepguard.state.run_state import SavedState

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


# --- one process alone: no collective, no hook. Several ranks are tested in tests/distributed


def test_one_process_needs_no_reduction_and_asks_itself() -> None:
    agreement = Agreement(nn.Linear(2, 1))
    assert agreement.reduce(torch.ones(4), step=0) is None
    assert agreement.together(lambda: {"bad": ["param:weight"]}, "a look") == [
        {"bad": ["param:weight"]}
    ]


# --- two ranks as two threads over one real store; real processes are in tests/distributed


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    shared = dist.HashStore()
    monkeypatch.setattr(agreement, "default_store", lambda: shared)
    return shared


def pair(seconds: float) -> list[Meeting]:
    return [Meeting("stepguard/0-1/0", (4, 6), own, seconds) for own in (4, 6)]


def both_come(meetings: list[Meeting], what: str, step: int) -> list[BaseException | None]:
    """What each rank heard; None for go."""
    with ThreadPoolExecutor(2) as threads:
        coming = [threads.submit(meeting.all_came, what, step) for meeting in meetings]
    return [one.exception() for one in coming]


def test_ranks_that_all_come_go_on_every_time_and_leave_little_behind(
    store: dist.HashStore,
) -> None:
    meetings = pair(20.0)
    for step in (0, 0, 1, 0):
        assert both_come(meetings, "the reading", step) == [None, None]
    assert store.num_keys() <= 4


def test_rank_that_waits_in_vain_names_the_missing_one_and_a_late_one_hears_the_same() -> None:
    first, second = pair(0.05)
    with pytest.raises(RankAbsent, match=r"rank 6 did not arrive within 0.05 s .* step 3"):
        first.all_came("the save", 3)
    with pytest.raises(RankAbsent, match=r"rank 6 did not arrive"):
        second.all_came("the save", 3)


def test_call_of_one_rank_does_not_shift_what_follows() -> None:
    first, _ = pair(0.05)
    with pytest.raises(RankAbsent):
        first.all_came("the save", 3)
    assert both_come(pair(20.0), "the save", 4) == [None, None]


def test_nobody_waits_for_a_rank_that_has_left() -> None:
    first, second = pair(600.0)
    second.leave("has closed its guard", for_good=True)
    with pytest.raises(RankAbsent, match=r"rank 6 has closed its guard, so it did not arrive"):
        first.all_came("the reading", 1)
    with pytest.raises(RankAbsent, match=r"rank 6 has closed its guard before step 2"):
        first.refuse_if_closed(2)


def test_guard_of_one_rank_only_leaves_nothing_behind(store: dist.HashStore) -> None:
    first, _ = pair(0.05)
    with pytest.raises(RankAbsent, match=r"rank 6 did not arrive"):
        first.all_came("the reading", 3)
    first.nobody_came("the reading", 3)
    first.leave("has closed its guard", for_good=True)
    assert both_come(pair(20.0), "the reading", 3) == [None, None]


def test_nobody_waits_at_a_meeting_that_a_rank_has_called_off() -> None:
    meetings = pair(600.0)
    first, second = meetings
    second.call_off("the origin", 3, 1, "OSError: full")
    with pytest.raises(RankAbsent, match=r"rank 6 has failed \(OSError: full\) for the origin"):
        first.all_came("the origin", 3)
    assert both_come(meetings, "the origin", 4) == [None, None]


# --- what one rank has of its own is put beside rank 0's state, and taken out again


def two_ranks() -> SavedState:
    tensors = {
        "model/a": torch.zeros(1),
        "model/first": torch.zeros(1),
        "rng/0/torch": torch.zeros(1),
        "rank/1/model/a": torch.ones(1),
        "rank/1/model/second": torch.ones(2),
    }
    own = {
        "has": ["model/a", "model/second"],
        "lacks": ["model/first"],
        "facts": {"groups": [{"params": ["a", "second"]}]},
    }
    facts = {"groups": [{"params": ["a", "first"]}], "numbers": 0, "ranks": {"1": own}}
    return SavedState(tensors, facts)


def test_each_rank_finds_its_own_names_values_and_facts() -> None:
    kept = two_ranks()
    first = state_of_rank(kept.tensors, kept.facts, 0)
    second = state_of_rank(kept.tensors, kept.facts, 1)
    assert sorted(first.tensors) == ["model/a", "model/first", "rng/0/torch"]
    assert sorted(second.tensors) == ["model/a", "model/second", "rng/0/torch"]
    assert float(first.tensors["model/a"]) == 0 and float(second.tensors["model/a"]) == 1
    assert first.facts["groups"] == [{"params": ["a", "first"]}]
    assert second.facts["groups"] == [{"params": ["a", "second"]}]
    assert second.facts["numbers"] == 0


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_is_refused_where_trained_weights_differ(size: int) -> None:
    kept = two_ranks()
    refuse_other_size(kept.facts, 2)
    with pytest.raises(StoreError, match=rf"first model/a\) and this run has {size}: .* with 2"):
        refuse_other_size(kept.facts, size)


def test_buffers_of_other_ranks_do_not_bind_a_run_to_its_number_of_ranks() -> None:
    own: dict[str, Any] = {"has": ["model/mean"], "lacks": [], "facts": {}}
    refuse_other_size({"groups": [{"params": ["a"]}], "ranks": {"1": own}}, 4)


# --- ranks that look into one store before the same steps stop at the same step


TERM = 15


@dataclass
class Ranks:
    """Ranks in lockstep, by a clock that goes on with every step of the first one."""

    count: int = 2
    seconds: float = 0.25
    now: float = 0.0
    store: Any = field(default_factory=dist.HashStore)

    def __post_init__(self) -> None:
        self.contexts = [
            SimpleNamespace(
                step=0, agreement=SimpleNamespace(name="x", rank=rank, begin=lambda: None)
            )
            for rank in range(self.count)
        ]
        self.stops = [
            AgreedStop(context, store=lambda: self.store, clock=lambda: self.now)  # type: ignore[arg-type]
            for context in self.contexts
        ]

    def before_step(self, asks: set[int]) -> list[int | None]:
        told = []
        for rank, stop in enumerate(self.stops):
            told.append(stop.reached())
            if rank in asks and told[-1] is None:
                stop.ask(TERM)
        for context in self.contexts:
            context.step += 1
        self.now += self.seconds
        return told

    def stopped(self, asked_at: dict[int, int], most: int = 400) -> list[int]:
        """Before which step each rank was told to stop."""
        for step in range(most):
            asks = {rank for rank, at in asked_at.items() if step >= at}
            told = self.before_step(asks)
            if any(told):
                assert all(told), "one rank goes on alone"
                return [step] * len(told)
        return []


def test_signal_of_one_rank_stops_all_before_the_same_step() -> None:
    for at in range(40):
        for rank in (0, 1):
            (first, second) = Ranks().stopped({rank: at})
            assert first == second and at + 1 < first <= at + 12


def test_signals_at_different_steps_are_one_stop() -> None:
    first = Ranks(count=3).stopped({2: 10, 0: 11, 1: 12})
    assert len(set(first)) == 1 and first[0] > 11


def test_ranks_that_do_not_keep_step_act_alone() -> None:
    ranks = Ranks()
    ranks.before_step(set())
    ranks.contexts[1].step += 3
    ranks.stops[1]._look += 3
    for _ in range(8):
        ranks.before_step(set())
    assert ranks.stops[1].lost


def test_store_that_is_gone_leaves_every_rank_to_itself() -> None:
    ranks = Ranks()
    ranks.before_step(set())
    ranks.store = None
    assert ranks.before_step({0}) == [None, None]
    assert ranks.stops[0].lost

"""Ranks that look into one store before the same steps stop at the same step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from stepguard.ranks.hung import AgreedStop

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


def test_nobody_stops_without_a_signal() -> None:
    assert Ranks().stopped({}) == []


def test_looks_are_about_a_second_apart() -> None:
    ranks = Ranks(seconds=0.001)
    looks = 0
    for _ in range(3000):
        before = ranks.stops[0]._number
        ranks.before_step(set())
        looks += ranks.stops[0]._number - before
    assert looks < 20 and not ranks.stops[1].lost


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

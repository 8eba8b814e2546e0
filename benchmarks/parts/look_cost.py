"""What a deep look costs: steps with a look beside steps without, and what is left over a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch.optim import AdamW

import stepguard
from benchmarks.parts.variants import RATE, bare
from benchmarks.parts.workloads import Workload
from stepguard.probes.looks import FIRST, SHARE, Looks

ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LookCost:
    """Medians over the rounds."""

    plain_seconds: float
    """A guarded step without a look."""
    looked_seconds: float
    """A guarded step with one."""
    claimed_seconds: float
    """What a look says that it took."""

    @property
    def steps(self) -> float:
        """Steps that one look takes the time of."""
        return (self.looked_seconds - self.plain_seconds) / self.plain_seconds

    @property
    def amortised(self) -> float:
        """Ratio of a long run under `auto`, after its first look.

        `auto` charges a look with what it says, and with what its step took beyond that, up to as
        much again: a look that takes more than twice what it says costs more than its share.
        """
        added = self.looked_seconds - self.plain_seconds
        unseen = min(max(0.0, added - self.claimed_seconds), self.claimed_seconds)
        return 1.0 + SHARE * added / (self.claimed_seconds + unseen)


def look_cost(workload: Workload, rounds: int = ROUNDS) -> LookCost:
    """One guarded model, of whose steps every second one is looked at."""
    generator = torch.Generator().manual_seed(0)
    model = workload.build()
    optimizer = AdamW(model.parameters(), lr=RATE)
    step = bare(workload, model, optimizer).step
    claimed: list[float] = []
    looked: list[float] = []
    plain: list[float] = []

    config = stepguard.GuardConfig(
        probes=stepguard.Probes(look_every=2),
        snapshots=stepguard.Snapshots(count=0),
        terminal="quiet",
    )
    with stepguard.watch(model, optimizer, config=config) as guard:
        looks = guard._driver.looks
        assert isinstance(looks, Looks)
        take = looks.schedule.took

        def took(step: int, seconds: float) -> None:
            claimed.append(seconds)
            take(step, seconds)

        looks.schedule.took = took  # type: ignore[method-assign]
        for _ in range(FIRST + 2 * rounds):
            before = len(claimed)
            batch = workload.batch(generator)
            began = time.perf_counter()
            step(batch)
            seconds = time.perf_counter() - began
            if len(claimed) > before:
                looked.append(seconds)
            else:
                plain.append(seconds)
    return LookCost(
        # the first steps allocate what the optimizer needs, and the first look warms up
        plain_seconds=median(plain[FIRST:]),
        looked_seconds=median(looked[1:]),
        claimed_seconds=median(claimed[1:]),
    )

"""Timing variants against each other on a machine that does other things as well.

Every variant has its own model with the same weights and sees the same batches. In each round it is
run right beside a bare step on that same model, each of the two first in half of the rounds, and
only the ratio of such neighbours counts: what slows the machine down for seconds slows down both.
The control is bare on both sides: how far it lies from 1 is what the method cannot tell apart.
Intervals are over rounds only.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.parts.variants import Pair, Runner, Variant
from benchmarks.parts.workloads import Batch, Workload, hollow

SEED = 20240607
RESAMPLES = 2000


@dataclass
class Times:
    """Seconds of one variant and of the bare step beside it, one entry a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    bare_wall: list[float] = field(default_factory=list)
    bare_cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """What is reported of one variant on one workload. Ratios are to the bare step with the same
    optimizer.
    """

    variant: str
    what: str
    ours: bool
    fused: bool
    missing: str | None = None
    rounds: int = 0
    ratio: float | None = None
    """Median over rounds, wall clock."""
    quartiles: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None
    """Of the median, 95 %, by resampling rounds."""
    cpu_ratio: float | None = None
    """Median over rounds of CPU seconds: the same on a quiet machine, steadier on a busy one."""
    cpu_interval: tuple[float, float] | None = None
    milliseconds: float | None = None
    """Median wall time of the step."""
    bare_cpu_milliseconds: float | None = None
    """Median CPU time of the bare step beside it."""
    added_milliseconds: float | None = None
    """Median CPU time the check adds, measured with forward and backward taken out."""
    added_interval: tuple[float, float] | None = None

    @property
    def added_share(self) -> float | None:
        """What the check adds, as a share of the bare step."""
        if self.added_milliseconds is None or not self.bare_cpu_milliseconds:
            return None
        return self.added_milliseconds / self.bare_cpu_milliseconds


def compare(
    workload: Workload,
    variants: Sequence[Variant],
    rounds: tuple[int, int],
    warmup: int,
    tick: Callable[[], None],
) -> list[Row]:
    """Count full steps in the first rounds, steps without forward and backward in the second."""
    full = measure(workload, variants, rounds[0], warmup, tick)
    own = measure(hollow(workload), [v for v in variants if not v.inside], rounds[1], warmup, tick)
    return [_row(v, full.get(v.name), own.get(v.name)) for v in variants]


def measure(
    workload: Workload,
    variants: Sequence[Variant],
    rounds: int,
    warmup: int,
    tick: Callable[[], None],
) -> dict[str, Times]:
    """Run all variants in turns; `tick` is called after every pair."""
    present = [v for v in variants if v.missing is None]
    pairs = {v.name: v.pair(workload) for v in present if v.name != v.reference}
    times = {v.name: Times() for v in present}
    draw, data = random.Random(SEED), torch.Generator().manual_seed(SEED)
    orders = {name: _orders(warmup + rounds, draw) for name in pairs}
    try:
        for turn in range(warmup + rounds):
            batch = workload.batch(data)
            gc.collect()
            for variant in draw.sample(present, len(present)):
                if variant.name != variant.reference:
                    spent = _both(pairs[variant.name], batch, own_first=orders[variant.name][turn])
                    if turn >= warmup:
                        _note(times[variant.name], *spent)
                    tick()
    finally:
        for pair in pairs.values():
            pair.own.close()
    _bare_rows(present, times)
    return times


Spent = tuple[float, float]


def _orders(turns: int, draw: random.Random) -> list[bool]:
    """Who comes first in each round: each as often as the other, for the second finds its weights
    in the cache.
    """
    orders = []
    while len(orders) < turns:
        orders += draw.sample([True, False], 2)
    return orders[:turns]


def _both(pair: Pair, batch: Batch, *, own_first: bool) -> tuple[Spent, Spent]:
    """The variant and its bare neighbour."""
    if own_first:
        own = _spent(pair.own, batch)
        return own, _spent(pair.bare, batch)
    reference = _spent(pair.bare, batch)
    return _spent(pair.own, batch), reference


def _spent(runner: Runner, batch: Batch) -> Spent:
    with runner.stage():
        cpu, wall = time.process_time(), time.perf_counter()
        runner.step(batch)
        return time.perf_counter() - wall, time.process_time() - cpu


def _note(times: Times, own: Spent, bare: Spent) -> None:
    times.wall.append(own[0])
    times.cpu.append(own[1])
    times.bare_wall.append(bare[0])
    times.bare_cpu.append(bare[1])


def _bare_rows(present: Sequence[Variant], times: dict[str, Times]) -> None:
    """The bare steps were timed beside the others; each round counts once for every neighbour."""
    for bare in present:
        if bare.name == bare.reference:
            beside = [
                times[v.name] for v in present if v.reference == bare.name and v.name != bare.name
            ]
            walls, cpus = (
                [w for t in beside for w in t.bare_wall],
                [c for t in beside for c in t.bare_cpu],
            )
            times[bare.name] = Times(walls, cpus, walls, cpus)


def _row(variant: Variant, full: Times | None, own: Times | None) -> Row:
    described = Row(variant.name, variant.what, variant.ours, variant.fused, variant.missing)
    if full is None or not full.wall:
        return described
    ratios = [a / b for a, b in zip(full.wall, full.bare_wall, strict=True)]
    cpu_ratios = [a / max(b, 1e-9) for a, b in zip(full.cpu, full.bare_cpu, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    row = replace(
        described,
        rounds=len(ratios),
        ratio=statistics.median(ratios),
        quartiles=(low, high),
        interval=interval_of_median(ratios),
        cpu_ratio=statistics.median(cpu_ratios),
        cpu_interval=interval_of_median(cpu_ratios),
        milliseconds=1e3 * statistics.median(full.wall),
        bare_cpu_milliseconds=1e3 * statistics.median(full.bare_cpu),
    )
    if own is None or variant.name == variant.reference:
        return row
    added = [1e3 * (a - b) for a, b in zip(own.cpu, own.bare_cpu, strict=True)]
    return replace(
        row, added_milliseconds=statistics.median(added), added_interval=interval_of_median(added)
    )


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of resampled values; always the same for the same values."""
    draw = random.Random(SEED)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]

"""What a run has looked like so far. Only finite values of committed steps ever enter."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import median
from typing import Any

from stepguard.records.reading import Reading

MAD_TO_SIGMA = 1.4826
"""Makes the median absolute deviation of normal noise equal to its standard deviation."""
MEAN_TO_SIGMA = 1.2533
"""The same for the mean absolute deviation."""
FIRST_LOSSES = 3
"""How many losses stand for the level a run began at."""


@dataclass(slots=True)
class History:
    """A window of healthy losses, where the run began, its best level, and learning rates."""

    window: int = 64
    losses: deque[float] = field(default_factory=deque)
    first: list[float] = field(default_factory=list)
    best: float | None = None
    last_loss: float | None = None
    configured_lr: tuple[float, ...] = ()
    """What the groups were set to when the guard was built, or what the user says they should be.
    """
    first_lr: tuple[float, ...] = ()
    """What the first step of the run used."""
    top_lr: tuple[float, ...] = ()
    """The highest learning rate each group has run with."""
    rates: deque[tuple[float, ...]] = field(default_factory=deque)
    """Learning rates of recent committed steps, oldest first."""
    norms: deque[float] = field(default_factory=deque)
    """Finite gradient norms of recent committed steps, oldest first."""
    zero_losses: int = 0
    """Committed steps in a row whose loss and gradient were exactly 0."""
    surrogate: bool = False
    """The first loss was exactly 0 and its gradient was not: a policy's objective or a penalty, no
    measure of error.
    """
    committed: int = 0
    best_noise: float = 0.0
    """How far one loss lay from the next when `best` was reached."""
    near_best_at: int = 0
    """Committed steps when the level was last near its best."""
    ruined_at: int | None = None
    """The step in which most of what the run had learned was found lost; None once the level is
    back.
    """

    def __post_init__(self) -> None:
        self.losses = deque(self.losses, maxlen=self.window)
        self.rates = deque(self.rates, maxlen=self.window)
        self.norms = deque(self.norms, maxlen=self.window)

    def add(self, reading: Reading) -> None:
        """Remember a committed step."""
        self.committed += 1
        self.first_lr = self.first_lr or reading.lr
        self.top_lr = _highest(self.top_lr, reading.lr)
        self.rates.append(reading.lr)
        if reading.grad_norm is not None and math.isfinite(reading.grad_norm):
            self.norms.append(reading.grad_norm)
        nothing = reading.judged_loss == 0.0 and not reading.grad_norm
        self.zero_losses = self.zero_losses + 1 if nothing else 0
        loss = reading.judged_loss
        if loss is None or not math.isfinite(loss):
            return
        if not self.first:
            self.surrogate = loss == 0.0 and bool(reading.grad_norm)
        self.losses.append(loss)
        self.last_loss = loss
        if len(self.first) < FIRST_LOSSES:
            self.first.append(loss)
        level = self.level
        if self.best is None or level < self.best:
            self.best = level
            self.best_noise = self.noise
        self._judge_level(level, reading.step)

    def _judge_level(self, level: float, step: int) -> None:
        """Latch a sudden loss of what was learned, and let go once the level is back.

        A loss that rises over many hundred steps (a value function whose targets grow) is not
        sudden, and one that never fell (a policy's objective, a generator's loss) has nothing to
        lose: neither is a ruin.
        """
        if level <= self.near_best:
            self.near_best_at = self.committed
        if self.ruined_at is not None:
            if level <= self.back_limit:
                self.ruined_at = None
        elif level > self.ruin_limit and (
            self.committed - self.near_best_at <= SUDDEN or not self.learned
        ):
            self.ruined_at = step

    @property
    def level(self) -> float:
        """The usual loss now."""
        return median(list(self.losses)[-9:])

    @property
    def began_at(self) -> float:
        return max(self.first)

    @property
    def spread(self) -> float:
        """How far losses usually lie from their level; never 0, so that a flat run can still be
        judged.
        """
        values = list(self.losses)
        centre = median(values)
        away = [abs(v - centre) for v in values]
        # where most losses are equal (often 0) the median says nothing about the rest, the mean
        # does
        noise = MAD_TO_SIGMA * median(away) or MEAN_TO_SIGMA * sum(away) / len(away)
        floor = (
            0.1 * abs(centre)
            if len(values) >= MATURE
            else max(abs(centre), max(values) - min(values))
        )
        return max(noise, floor, 1e-12)

    @property
    def noise(self) -> float:
        """How far one loss lies from the next, whatever the trend."""
        values = list(self.losses)
        steps = [abs(b - a) for a, b in pairwise(values)]
        return MAD_TO_SIGMA * median(steps) / math.sqrt(2.0) if steps else 0.0

    @property
    def learned(self) -> bool:
        """Has the loss fallen so far that it measures progress? Not in a run that started
        converged.
        """
        if self.best is None:
            return False
        progress = self.began_at - self.best
        return (
            progress >= LEARNED_SHARE * abs(self.began_at)
            and progress >= LEARNED_NOISE * self.best_noise
        )

    @property
    def ruin_limit(self) -> float:
        """The level above which what was learned is lost."""
        assert self.best is not None
        if not self.learned:
            return self.far_limit
        return self.best + RUIN_SHARE * (self.began_at - self.best)

    @property
    def far_limit(self) -> float:
        """A level that no run comes to by learning something else."""
        return self.began_at + FAR_ABOVE_START * max(abs(self.began_at), self.best_noise)

    @property
    def back_limit(self) -> float:
        """The level at which a ruined run counts as recovered."""
        assert self.best is not None
        return (
            self.best + BACK_SHARE * (self.began_at - self.best)
            if self.learned
            else self.ruin_limit
        )

    @property
    def near_best(self) -> float:
        assert self.best is not None
        return self.best + NEAR_SHARE * (self.began_at - self.best) + USUAL * self.best_noise

    def excess_lr(self, rates: tuple[float, ...]) -> int | None:
        """The first group that runs with far more than it was ever configured or seen with."""
        for group, rate in enumerate(rates):
            ceiling = self.ceiling(group)
            if ceiling > 0 and not rate <= LR_JUMP * ceiling:
                return group
        return None

    def ceiling(self, group: int) -> float:
        """The highest learning rate this group was configured or seen with."""
        known = [rates[group] for rates in (self.configured_lr, self.top_lr) if group < len(rates)]
        return max(known, default=0.0)


USUAL = 2.0
"""Deviations above its usual level within which a loss says nothing against the weights."""
LR_JUMP = 2.0
"""Times above every configured and seen learning rate."""
LEARNED_SHARE = 0.3
"""Of the loss it began at, that must have gone before the loss counts as a measure of what was
learned.
"""
LEARNED_NOISE = 8.0
"""Times the noise of the loss that the progress must be."""
RUIN_SHARE, BACK_SHARE, NEAR_SHARE = 0.75, 0.5, 0.25
"""Of what was learned: lost when a run counts as ruined, still lost when it counts as back, and
near the best.
"""
FAR_ABOVE_START = 100.0
"""Times the loss a run began at, for a run whose loss measures nothing."""
SUDDEN = 128
"""Committed steps within which a loss of what was learned is an accident, and not the way this run
goes.
"""
MATURE = 16
"""Losses from which on the noise can be told from the trend."""


def history_facts(history: History) -> dict[str, Any]:
    """Everything it remembers, in plain containers of its own."""
    found = {f.name: getattr(history, f.name) for f in fields(history)}
    return {
        name: list(value) if isinstance(value, deque | list) else value
        for name, value in found.items()
    }


def history_from(facts: dict[str, Any]) -> History:
    """The inverse of `history_facts`; what another version wrote and this one does not know is left
    out.
    """
    known = {f.name for f in fields(History)}
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, list) else value
        for name, value in facts.items()
        if name in known
    }
    return History(**given)


def _highest(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
    if len(before) != len(now):
        return tuple(rate if math.isfinite(rate) else 0.0 for rate in now)
    return tuple(max(a, b) if math.isfinite(b) else a for a, b in zip(before, now, strict=True))

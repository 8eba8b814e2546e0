"""Remember what a run has looked like so far: finite values of committed steps only."""

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
LEVEL_LOSSES = 9
"""How many of the last losses stand for the present level."""
USUAL = 2.0
"""Deviations above its usual level within which a loss says nothing against the weights."""
LR_JUMP = 2.0
"""Times above every configured and seen learning rate."""
LEARNED_SHARE = 0.3
"""Of the loss a run began at: how much must have gone before the loss measures what was learned."""
LEARNED_NOISE = 8.0
"""Times the noise of the loss that the progress must be."""
RUIN_SHARE = 0.75
"""Of what was learned: lost when a run counts as ruined."""
BACK_SHARE = 0.5
"""Of what was learned: still lost when a ruined run counts as recovered."""
NEAR_SHARE = 0.25
"""Of what was learned: still lost when the level counts as near its best."""
FAR_ABOVE_START = 100.0
"""Times the loss a run began at, for a run whose loss measures nothing."""
SUDDEN = 128
"""Committed steps within which losing what was learned is an accident, and not this run's trend."""
MATURE = 16
"""Losses from which on the noise can be told from the trend."""


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
    """The first loss was exactly 0 and its gradient was not: a policy's objective or a penalty."""
    committed: int = 0
    best_noise: float = 0.0
    """How far one loss lay from the next when `best` was reached."""
    near_best_at: int = 0
    """Committed steps when the level was last near its best."""
    ruined_at: int | None = None
    """The step in which most of what was learned was found lost; None once the level is back."""

    def __post_init__(self) -> None:
        # a history that was read from a checkpoint brings lists, and perhaps another window
        self.losses = deque(self.losses, maxlen=self.window)
        self.rates = deque(self.rates, maxlen=self.window)
        self.norms = deque(self.norms, maxlen=self.window)

    def add(self, reading: Reading) -> None:
        """Remember a committed step."""
        self.committed += 1
        self.first_lr = self.first_lr or reading.lr
        self.top_lr = _highest(self.top_lr, reading.lr)
        self.rates.append(reading.lr)
        # one NaN would blind every median that it takes part in
        if reading.grad_norm is not None and math.isfinite(reading.grad_norm):
            self.norms.append(reading.grad_norm)
        loss = reading.judged_loss
        if loss == 0.0 and not reading.grad_norm:
            self.zero_losses += 1
        else:
            self.zero_losses = 0
        if loss is None or not math.isfinite(loss):
            return
        # an advantage or a divergence from a reference is exactly 0 before the first update
        if not self.first:
            self.surrogate = loss == 0.0 and bool(reading.grad_norm)
        self._add_loss(loss, reading.step)

    def _add_loss(self, loss: float, step: int) -> None:
        self.losses.append(loss)
        self.last_loss = loss
        if len(self.first) < FIRST_LOSSES:
            self.first.append(loss)
        level = self.level
        if self.best is None or level < self.best:
            self.best = level
            self.best_noise = self.noise
        self._judge_level(level, step)

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
            return
        sudden = self.committed - self.near_best_at <= SUDDEN
        if level > self.ruin_limit and (sudden or not self.learned):
            self.ruined_at = step

    @property
    def level(self) -> float:
        """The usual loss now."""
        return median(list(self.losses)[-LEVEL_LOSSES:])

    @property
    def began_at(self) -> float:
        return max(self.first)

    @property
    def spread(self) -> float:
        """How far losses usually lie from their level; never 0, so that a flat run has one."""
        values = list(self.losses)
        centre = median(values)
        away = [abs(value - centre) for value in values]
        # where most losses are equal (often 0) the median tells nothing of the rest, the mean does
        noise = MAD_TO_SIGMA * median(away) or MEAN_TO_SIGMA * sum(away) / len(away)
        floor = 0.1 * abs(centre)
        if len(values) < MATURE:
            floor = max(abs(centre), max(values) - min(values))
        return max(noise, floor, 1e-12)

    @property
    def noise(self) -> float:
        """How far one loss lies from the next, whatever the trend."""
        if len(self.losses) < 2:
            return 0.0
        # differences of neighbours: a trend of the loss is not noise
        changes = [abs(after - before) for before, after in pairwise(self.losses)]
        return MAD_TO_SIGMA * median(changes) / math.sqrt(2.0)

    @property
    def learned(self) -> bool:
        """Has the loss fallen so far that it measures progress? Not if the run began converged."""
        if self.best is None:
            return False
        share = LEARNED_SHARE * abs(self.began_at)
        return self.began_at - self.best >= max(share, LEARNED_NOISE * self.best_noise)

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
        if not self.learned:
            return self.ruin_limit
        return self.best + BACK_SHARE * (self.began_at - self.best)

    @property
    def near_best(self) -> float:
        assert self.best is not None
        return self.best + NEAR_SHARE * (self.began_at - self.best) + USUAL * self.best_noise

    def excess_lr(self, rates: tuple[float, ...]) -> int | None:
        """The first group that runs with far more than it was ever configured or seen with."""
        for group, rate in enumerate(rates):
            ceiling = self.ceiling(group)
            # written with `not`, so that NaN counts as an excess
            if ceiling > 0 and not rate <= LR_JUMP * ceiling:
                return group
        return None

    def ceiling(self, group: int) -> float:
        """The highest learning rate this group was configured or seen with."""
        highest = 0.0
        for rates in (self.configured_lr, self.top_lr):
            if group < len(rates):
                highest = max(highest, rates[group])
        return highest


def history_facts(history: History) -> dict[str, Any]:
    """Everything a history remembers, in plain containers of its own."""
    facts: dict[str, Any] = {}
    for known in fields(history):
        value = getattr(history, known.name)
        facts[known.name] = list(value) if isinstance(value, deque | list) else value
    return facts


def history_from(facts: dict[str, Any]) -> History:
    """Undo `history_facts`; fields that this version does not know are left out."""
    given: dict[str, Any] = {}
    for known in fields(History):
        if known.name in facts:
            value = facts[known.name]
            given[known.name] = list(value) if isinstance(value, list) else value
    return History(**given)


def _highest(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
    """The highest finite rate of each group so far; all new where groups were added."""
    if len(before) != len(now):
        before = (0.0,) * len(now)
    highest = []
    for known, rate in zip(before, now, strict=True):
        highest.append(max(known, rate) if math.isfinite(rate) else known)
    return tuple(highest)

"""What a run has looked like so far. Only finite values of committed steps ever enter."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
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
    """What the groups were set to when the guard was built, or what the user says they should be."""
    top_lr: tuple[float, ...] = ()
    """The highest learning rate each group has run with."""
    rates: deque[tuple[float, ...]] = field(default_factory=deque)
    """Learning rates of recent committed steps, oldest first."""
    norms: deque[float] = field(default_factory=deque)
    """Finite gradient norms of recent committed steps, oldest first."""
    zero_losses: int = 0
    """Committed steps in a row whose loss and gradient were exactly 0."""
    surrogate: bool = False
    """The first loss was exactly 0 and its gradient was not: a policy's objective or a penalty, no measure of error."""
    committed: int = 0
    jumped_at: int | None = None
    """The last step whose learning rate was far above everything before."""

    def __post_init__(self) -> None:
        self.losses = deque(self.losses, maxlen=self.window)
        self.rates = deque(self.rates, maxlen=self.window)
        self.norms = deque(self.norms, maxlen=self.window)

    def add(self, reading: Reading) -> None:
        """Remember a committed step."""
        self.committed += 1
        if self.excess_lr(reading.lr) is not None:
            self.jumped_at = reading.step
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
        self.best = level if self.best is None else min(self.best, level)

    def begin_anew(self) -> None:
        """Another loss from now on: what was usual says nothing about it. Learning rates and norms stay known."""
        self.losses.clear()
        self.first.clear()
        self.best = self.last_loss = None

    @property
    def level(self) -> float:
        """The usual loss now."""
        return median(list(self.losses)[-9:])

    @property
    def limit(self) -> float | None:
        """The highest level that still counts as where the loss has been; None before the first loss."""
        if not self.losses:
            return None
        return min(self.level, median(self.losses)) + USUAL * self.spread

    @property
    def began_at(self) -> float:
        return max(self.first)

    @property
    def spread(self) -> float:
        """How far losses usually lie from their level; never 0, so that a flat run can still be judged."""
        values = list(self.losses)
        centre = median(values)
        away = [abs(v - centre) for v in values]
        # where most losses are equal (often 0) the median says nothing about the rest, the mean does
        noise = MAD_TO_SIGMA * median(away) or MEAN_TO_SIGMA * sum(away) / len(away)
        floor = 0.1 * abs(centre) if len(values) >= MATURE else max(abs(centre), max(values) - min(values))
        return max(noise, floor, 1e-12)

    def excess_lr(self, rates: tuple[float, ...]) -> int | None:
        """The first group that runs with far more than it was ever configured or seen with."""
        for group, rate in enumerate(rates):
            ceiling = self.ceiling(group)
            if ceiling > 0 and not rate <= LR_JUMP * ceiling:
                return group
        return None

    def jumped_lately(self, step: int) -> bool:
        """Did the learning rate jump just before this step?"""
        return self.jumped_at is not None and step - self.jumped_at <= LR_JUMP_MEMORY

    def ceiling(self, group: int) -> float:
        """The highest learning rate this group was configured or seen with."""
        known = [rates[group] for rates in (self.configured_lr, self.top_lr) if group < len(rates)]
        return max(known, default=0.0)


USUAL = 2.0
"""Deviations above its usual level within which a loss says nothing against the weights."""
LR_JUMP = 2.0
"""Times above every configured and seen learning rate."""
LR_JUMP_MEMORY = 10
"""Steps for which a jump of the learning rate explains what follows."""
MATURE = 16
"""Losses from which on the noise can be told from the trend."""


def history_facts(history: History) -> dict[str, Any]:
    """Everything it remembers, in plain containers of its own."""
    found = {f.name: getattr(history, f.name) for f in fields(history)}
    return {name: list(value) if isinstance(value, deque | list) else value for name, value in found.items()}


def history_from(facts: dict[str, Any]) -> History:
    """The inverse of `history_facts`; what another version wrote and this one does not know is left out."""
    known = {f.name for f in fields(History)}
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, list) else value for name, value in facts.items() if name in known
    }
    return History(**given)


def _highest(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
    if len(before) != len(now):
        return tuple(rate if math.isfinite(rate) else 0.0 for rate in now)
    return tuple(max(a, b) if math.isfinite(b) else a for a, b in zip(before, now, strict=True))

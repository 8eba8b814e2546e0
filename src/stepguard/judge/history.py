"""Remember what a run has looked like so far: finite values of committed steps only."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, NamedTuple

from stepguard.records.incident import Reading

MAD_TO_SIGMA = 1.4826
"""Makes the median absolute deviation of normal noise equal to its standard deviation."""
FIRST_LOSSES = 3
"""How many losses stand for the level a run began at."""
LEVEL_LOSSES = 9
"""How many of the last losses stand for the present level."""
USUAL = 2.0
"""Deviations above its usual level within which a loss says nothing against the weights."""
LR_JUMP = 2.0
"""Times above every configured and seen learning rate."""
# What counts as diverged: the only place. Snapshots, seals, `last-good`, decisions, `live` and the
# line for launchers all ask `Progress` and `History.divergence`.

BACK_SHARE = 0.5
"""Share of what was learned that may still be lost when a diverged run counts as recovered. Also
the share of a rise that an earlier batch must show, and that older weights may keep."""
RUNAWAY = 10.0
"""Times every loss before it that a loss must be to count as running away."""
RISEN_ABOVE_START = 1.0
"""Times the loss a run began at, above it: the weights are inspected where nothing is learned."""
FAR_ABOVE_START = 100.0
"""Times the initial loss that no run reaches by learning something else."""
RUN_AWAY = 1e4
"""Times the initial loss that counts as diverged even if the weights are unknown."""
SUDDEN = 128
"""Committed steps within which losing what was learned is an accident, and not this run's trend."""
MOVED = 0.5
"""Distance from a good state, as a share of the weights' norm, beyond ordinary training."""
GROWN = 3.0
"""Times their size before the first step that weights must have to confirm a high loss."""
EXPLODED = 100.0
"""Times their size before the first step that no weights have, unless the loss shows progress."""
LEAST_SIZE = 0.05
"""Root mean square that weights which began near 0 may grow to before their growth counts."""
LEAST_SPREAD = 0.1
"""Share of the median loss; losses that lie closer to it are at their usual level."""
ZERO_STEPS = 5
"""Steps in a row with a loss and gradient of exactly 0 that are worth a line."""
MATURE = 16
"""Number of losses that tell the noise from the trend."""


class Progress:
    """How far a run has come by its loss: where it began, its best level, and the noise there."""

    def __init__(self, began_at: float, best: float, noise: float) -> None:
        self.began_at = began_at
        self.noise = noise
        progress = began_at - best
        # share of the initial loss that must be gone before the loss measures what was learned
        # times the noise of the loss that the progress must be
        self.learned = progress >= max(0.3 * abs(began_at), 8.0 * noise)
        """Has the loss fallen so far that it measures progress? Not if the run began converged."""
        self.unit = max(abs(began_at), noise, 1e-12)
        """What a rise is measured by where nothing was learned; never 0."""
        self.far_limit = self.lost_limit = self.back_limit = began_at + FAR_ABOVE_START * self.unit
        """The level that no run comes to by learning something else; above which what was learned
        is lost; at which a diverged run counts as recovered."""
        if self.learned:
            # share of what was learned that is lost when a run counts as diverged
            self.lost_limit = best + 0.75 * progress
            self.back_limit = best + BACK_SHARE * progress
        # share of what was learned that may be lost while the level counts as near its best
        self.near_best = best + 0.25 * progress + USUAL * noise

    def above_start(self, times: float) -> float:
        """The level that lies `times` the loss the run began at above it."""
        return self.began_at + times * self.unit


class Weights(NamedTuple):
    """What was measured of the weights, to confirm or refute what the loss says; None: unknown."""

    moved: float | None = None
    """Distance from a good state of the last steps, over their norm then."""
    update: float | None = None
    """The last update over their norm."""
    growth: float | None = None
    """Size of the weights over their size before the first step."""

    @property
    def known(self) -> bool:
        return (self.moved, self.update, self.growth) != (None, None, None)

    def grown(self, times: float) -> str:
        """Say how far they have grown, if by this factor; empty if not."""
        # written with `not`, so that NaN counts as far, here and below
        if self.growth is None or self.growth < times:
            return ""
        return f"its weights have grown to {self.growth:.3g} times their size"

    def left(self, least: float = MOVED) -> str:
        """Say how far they have left where they were good; empty if that is ordinary training."""
        if self.moved is not None and not self.moved < least:
            return f"its weights have moved by {self.moved:.3g} of their norm"
        # a tenth of the weights' norm is a hundred times what is usual
        if self.update is not None and not self.update < 0.1:
            return f"the last update was {self.update:.3g} of the weights' norm"
        return ""


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
    zero_stretches: int = 0
    """How often that has lasted for `ZERO_STEPS`."""
    surrogate: bool = False
    """The first loss was exactly 0 and its gradient was not: a policy's objective or a penalty."""
    committed: int = 0
    best_at: int = 0
    """Committed steps when `best` was reached."""
    best_noise: float = 0.0
    """How far one loss lay from the next when `best` was reached."""
    near_best_at: int = 0
    """Committed steps when the level was last near its best."""
    diverged_at: int | None = None
    """The step in which the loss was found too high; None once its level is back. Not yet a
    verdict: weights have to confirm it."""

    def __post_init__(self) -> None:
        # a history that was read from a checkpoint brings lists, and perhaps another window
        self.losses = deque(self.losses, maxlen=self.window)
        self.rates = deque(self.rates, maxlen=self.window)
        self.norms = deque(self.norms, maxlen=self.window)

    def add(self, reading: Reading) -> None:
        """Remember a committed step."""
        self.committed += 1
        self.first_lr = self.first_lr or reading.lr
        if reading.lr != self.top_lr:
            self.top_lr = _highest(self.top_lr, reading.lr)
        self.rates.append(reading.lr)
        # one NaN would blind every median that it takes part in
        if reading.grad_norm is not None and math.isfinite(reading.grad_norm):
            self.norms.append(reading.grad_norm)
        loss = reading.judged_loss
        if loss == 0.0 and not reading.grad_norm:
            self.zero_losses += 1
            self.zero_stretches += self.zero_losses == ZERO_STEPS
        else:
            self.zero_losses = 0
        if loss is None or not math.isfinite(loss):
            return
        # an advantage or a divergence from a reference is exactly 0 before the first update
        if not self.first:
            self.surrogate = loss == 0.0 and bool(reading.grad_norm)
        self.losses.append(loss)
        self.last_loss = loss
        if len(self.first) < FIRST_LOSSES:
            self.first.append(loss)
        level = self.level
        if self.best is None or level < self.best:
            self.best = level
            self.best_at = self.committed
            self.best_noise = self.noise
            self.near_best_at = self.committed
            self.diverged_at = None
        else:
            self._judge_level(level, reading.step)

    def _judge_level(self, level: float, step: int) -> None:
        """Latch a loss that is too high, and let go once its level is back.

        A loss that rises over many hundred steps (a value function whose targets grow) is not
        sudden, and one that never fell (a policy's objective, a generator's loss) has nothing to
        lose: both count only where they are far above the start.
        """
        progress = self.progress
        if level <= progress.near_best:
            self.near_best_at = self.committed
        limit = back = progress.far_limit
        if progress.learned:
            back = progress.back_limit
            limit = progress.lost_limit if self.sudden else limit
        elif not self.surrogate:
            back = progress.above_start(RISEN_ABOVE_START)
            limit = back if self.sudden else limit
        if level <= back:
            self.diverged_at = None
        elif self.diverged_at is None and level > limit:
            self.diverged_at = step

    @property
    def sudden(self) -> bool:
        """Was the level near its best only a few steps ago?"""
        return self.committed - self.near_best_at <= SUDDEN

    def divergence(self, weights: Weights) -> str:
        """What shows on the weights that the present state has diverged; empty if nothing. Pure.

        The loss is judged against the best level of this run, which for a run that explodes at once
        is where it began, and the weights must confirm it: a new task, a policy or a generator
        raises the loss as much, on weights that move as they always did. Weights alone count where
        they have exploded and the loss shows no progress, or they did it since the last good state.
        """
        if not self.losses:
            # without a loss nothing less counts: targets of a million need weights of a million
            return weights.grown(1e8)
        progress = self.progress
        fallen = progress.began_at - USUAL * progress.noise
        kept = self.level <= progress.back_limit if progress.learned else self.level < fallen
        # the level is a median: weights may have exploded before it shows
        alone = not kept or (weights.moved or 0.0) >= EXPLODED
        return self._confirmed(weights) or (weights.grown(EXPLODED) if alone else "")

    def _confirmed(self, weights: Weights) -> str:
        """What confirms a loss that was found too high; empty where it was not, or nothing does."""
        if self.diverged_at is None:
            return ""
        progress = self.progress
        rise = (self.level - progress.began_at) / progress.unit
        lost = progress.learned or rise > FAR_ABOVE_START
        # steps within which moved weights can be the cause; later they have always moved
        caused = self.committed - self.near_best_at <= 32
        # two opponents that move fast lose to each other, and stay about where they began
        # twice as far counts while the loss is not far above where the run began
        least = MOVED if rise > RISEN_ABOVE_START else 1.0
        shown = weights.left(least) if rise > RUN_AWAY or (lost and caused) else ""
        if not shown and self.sudden and not progress.learned and rise > 0:
            # what growth of the weights times rise of the loss must be, where the loss is not far
            # above
            shown = weights.grown(max(GROWN, 30.0 / rise))
        if rise > RUN_AWAY and not weights.known:
            shown = "nothing is known of its weights"
        return shown

    def told(self, shown: str) -> str:
        """Say in one sentence where the loss is and was, and what is shown by the weights."""
        if not self.losses:
            return shown
        reached = f"the run began at {self.began_at:.4g}"
        if self.progress.learned:
            reached += f" and was at {self.best:.4g}"
        return f"the level of its loss is {self.level:.4g}, {reached}, and {shown}"

    @property
    def level(self) -> float:
        """The usual loss now."""
        return median(list(self.losses)[-LEVEL_LOSSES:])

    @property
    def began_at(self) -> float:
        """The highest of the first losses; the first alone, where it exploded at once."""
        first, top = self.first[0], max(self.first)
        return first if first and top > RUNAWAY * abs(first) else top

    @property
    def progress(self) -> Progress:
        assert self.best is not None
        best = self.best
        if self.best_at <= FIRST_LOSSES:
            # a first loss that was low by chance is nothing that was learned
            best = max(best, self.began_at)
        return Progress(self.began_at, best, self.best_noise)

    @property
    def spread(self) -> float:
        """How far losses usually lie from their level; never 0, so that a flat run has one."""
        values = list(self.losses)
        centre = median(values)
        away = [abs(value - centre) for value in values]
        # where most losses are equal (often 0) the median tells nothing of the rest, the mean does
        # standard deviation over mean absolute deviation, for a normal distribution
        noise = MAD_TO_SIGMA * median(away) or 1.2533 * sum(away) / len(away)
        began = abs(self.began_at)
        # share of the initial loss; smaller differences count as rounding
        floor = max(LEAST_SPREAD * abs(centre), 1e-5 * began)
        if not centre:
            # a loss that is usually 0 (a hinge, a solved task) comes back as a part of its former
            # self, which is not far above 0 by any other measure
            largest = max(map(abs, values))
            # the resolution of float32 near 1, for a run that began at 0
            floor = max(largest / 2, 0.1 * began, 1e-7)
        if len(values) < MATURE:
            floor = max(floor, abs(centre), max(values) - min(values))
        return max(noise, floor, 1e-12)

    @property
    def tail(self) -> float:
        """Deviations above the level that one loss in twenty, and at least three, go beyond.

        Above the level of its time too: the first losses of a run that learns are no tail.
        """
        values, level = list(self.losses), self.level
        above = sorted(
            loss - max(level, median(values[max(0, at - LEVEL_LOSSES + 1) : at + 1]))
            for at, loss in enumerate(values)
        )
        beyond = max(3, len(above) // 20)
        return above[-1 - beyond] / self.spread if len(above) > beyond else 0.0

    @property
    def noise(self) -> float:
        """How far one loss lies from the next, whatever the trend."""
        if len(self.losses) < 2:
            return 0.0
        # differences of neighbours: a trend of the loss is not noise
        losses = list(self.losses)
        changes = [a - b if a > b else b - a for a, b in zip(losses[1:], losses, strict=False)]
        return MAD_TO_SIGMA * median(changes) / math.sqrt(2.0)

    def excess_lr(self, rates: tuple[float, ...]) -> int | None:
        """The first group that runs with far more than it was ever configured or seen with."""
        if rates == self.top_lr:
            return None
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
    facts = {}
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

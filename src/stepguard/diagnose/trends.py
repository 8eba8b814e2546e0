"""What the recent steps say: did the learning rate jump, was the loss already rising?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepguard.diagnose.case import Case

ABOVE_ALL = 2.5
"""Times above every rate seen before (a linear warm-up doubles in its second step and is no jump).
"""
ABOVE_CONFIGURED = 2.0
IN_ONE_STEP = 5.0
"""Times above the rate of the step before, whatever was seen earlier: a schedule that was thrown
back.
"""
RISING = 10.0
"""Times the loss grew over the remembered steps."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A learning rate that is not what came before it."""

    group: int
    before: float
    now: float
    steps_ago: int | None
    """Steps between the jump and the bad step; None when it is measured against the configuration.
    """

    @property
    def sentence(self) -> str:
        times = f"{self.now / self.before:.3g} times " if self.before > 0 else ""
        against = "the configured rate" if self.steps_ago is None else "the rate before"
        when = {None: "", 0: ", in this very step", 1: ", 1 step before the bad one"}.get(
            self.steps_ago, f", {self.steps_ago} steps before the bad one"
        )
        return (
            f"group {self.group} runs with lr {self.now:.4g}, {times}{against} "
            f"({self.before:.4g}){when}"
        )


CLIMB = 2.0
"""Times above the first rate, or the declared one, from which on the schedule is worth a word."""


@dataclass(frozen=True, slots=True)
class Climb:
    """A learning rate that has grown step by step since the run began."""

    group: int
    first: float
    now: float
    steps: int | None
    declared: float | None
    """What the schedule calls its highest rate; None without a schedule."""

    @property
    def runaway(self) -> bool:
        """Above everything that was declared: a warm-up without an end."""
        return self.declared is not None and self.declared > 0 and self.now > CLIMB * self.declared

    @property
    def sentence(self) -> str:
        over = f" over {self.steps} steps" if self.steps else ""
        said = (
            f"the learning rate of group {self.group} has grown from {self.first:.4g} to "
            f"{self.now:.4g}{over}"
        )
        if self.declared:
            said += f" and is {self.now / self.declared:.3g} times initial_lr ({self.declared:.4g})"
        return said


def lr_climb(case: Case) -> Climb | None:
    """The group whose rate has grown most since the first step; None when no rate has grown much."""
    begun = case.facts.first_lr or (case.facts.lr_history[0] if case.facts.lr_history else ())
    found = []
    for group, (first, now) in enumerate(zip(begun, case.reading.lr, strict=False)):
        declared = case.facts.initial_lr[group] if group < len(case.facts.initial_lr) else None
        climb = Climb(group, first, now, case.facts.committed, declared)
        if (first > 0 and now > CLIMB * first) or climb.runaway:
            found.append(climb)
    return max(found, key=lambda climb: (climb.runaway, climb.now), default=None)


def lr_jump(case: Case) -> Jump | None:
    """The largest unexplained rise of a learning rate; None when every rate followed its schedule."""
    found = [
        jump
        for jump in (_in_history(case), _over_configured(case), _in_verdict(case))
        if jump is not None
    ]
    return max(found, key=lambda jump: jump.now / jump.before, default=None)


def _in_history(case: Case) -> Jump | None:
    history = case.facts.lr_history
    best: Jump | None = None
    for group in range(min((len(rates) for rates in history), default=0)):
        rates = [row[group] for row in history]
        for i in range(1, len(rates)):
            top, before, now = max(rates[:i]), rates[i - 1], rates[i]
            if top == 0:  # a group that stood still so far is measured by the others
                top = before = max(rate for row in history[:i] for rate in row)
            if before <= 0 or not (now > ABOVE_ALL * top or now > IN_ONE_STEP * before):
                continue
            jump = Jump(group, before, now, len(rates) - 1 - i)
            best = jump if best is None or jump.now / jump.before > best.now / best.before else best
    return best


def _over_configured(case: Case) -> Jump | None:
    pairs = zip(case.facts.configured_lr, case.reading.lr, strict=False)
    for group, (allowed, rate) in enumerate(pairs):
        if allowed > 0 and rate > ABOVE_CONFIGURED * allowed and not _climbed(case, group, allowed):
            return Jump(group, allowed, rate, None)
    return None


def _climbed(case: Case, group: int, allowed: float) -> bool:
    """A schedule that climbs from its start (OneCycle, a linear warm-up) ends far above it without
    any jump.
    """
    rates = [row[group] for row in case.facts.lr_history if group < len(row)]
    if case.facts.resumed or len(rates) < 2:
        return False
    from_the_start = case.facts.committed is None or case.facts.committed < len(rates)
    return not from_the_start or rates[0] <= ABOVE_CONFIGURED * allowed


def _in_verdict(case: Case) -> Jump | None:
    """The judge has already compared the rate with its ceiling."""
    said = case.verdict.evidence or {}
    group, rate, ceiling = said.get("group"), said.get("lr"), said.get("ceiling")
    if (
        isinstance(group, int)
        and isinstance(rate, int | float)
        and isinstance(ceiling, int | float)
        and ceiling > 0
    ):
        return Jump(group, float(ceiling), float(rate), None) if math.isfinite(rate) else None
    return None


def lr_not_a_number(case: Case) -> int | None:
    """The group whose learning rate is NaN or infinite."""
    return next(
        (group for group, rate in enumerate(case.reading.lr) if not math.isfinite(rate)), None
    )


def growth(values: tuple[float, ...]) -> float:
    """How many times larger the last value is than the smallest before it; 1 when nothing can be
    said.
    """
    if len(values) < 2:
        return 1.0
    lowest = min(abs(value) for value in values[:-1])
    return abs(values[-1]) / lowest if lowest > 0 else 1.0


def rising(case: Case) -> bool:
    """Losses or gradient norms had already grown manifold before the step went bad."""
    return growth(case.facts.losses) >= RISING or growth(case.facts.grad_norms) >= RISING

"""The learning rate: in the optimizer, over the whole schedule, and after loading a checkpoint."""

from __future__ import annotations

import math

from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import (
    Answer,
    DryRun,
    NotApplicable,
    NotGiven,
    failed,
    follows_metric,
    passed,
    peak_rates,
    warned,
)
from stepguard.records.checks import Rate
from stepguard.report.phrases import count

CLOSE = 1e-3
"""Relative; a rate written with three digits is the same rate."""
FAR_BELOW = 0.1
"""A floor missed by more than a factor of ten is another floor."""


def same_rate(first: float, second: float) -> bool:
    return abs(first - second) <= CLOSE * max(abs(first), abs(second))


def configured_rate(run: Inspection) -> tuple[float, str]:
    """The configured learning rate, and which setting names it."""
    setting = run.setting("lr")
    rate = run.number("lr")
    if setting is not None and rate is not None:
        return rate, str(setting)
    rate = run.framework.facts.get("lr")
    if rate is not None:
        return float(rate), f"TrainingArguments.learning_rate={rate:g}"
    raise NotGiven("give --config FILE that names the learning rate")


@item("lr.config", "the optimizer has the configured learning rate")
def config(run: Inspection) -> Answer:
    wanted, said = configured_rate(run)
    rates = peak_rates(run.optimizer)
    shown = ", ".join(f"{rate:.3g}" for rate in rates[:4])
    groups = f"{type(run.optimizer).__name__} runs its {count(len(rates), 'group')} up to {shown}"
    if any(same_rate(rate, wanted) for rate in rates):
        return passed(f"{said}; {groups}")
    return failed(
        f"{said}, but {groups}",
        fix="Pass the configured rate to the optimizer (and to OneCycleLR as max_lr); a literal in "
        "the code wins.",
    )


@item("lr.schedule", "the schedule keeps to the configured rates to the end")
def schedule(run: Inspection) -> Answer:
    kind = type(run.scheduler).__name__
    if follows_metric(run.scheduler):
        raise NotApplicable(f"{kind} follows a metric, which is not known beforehand")
    tried = run.schedule
    numbers = (
        f"{kind}: starts at {tried.first:.3g}, peaks at {tried.peak:.3g} in step "
        f"{tried.peak_step:,}, ends at {tried.last:.3g}; {tried.steps:,} steps tried"
    )
    if not tried.whole:
        numbers += " (the length of the run is not configured)"
    if tried.fault:
        return _ended_early(run, tried, numbers)
    if not math.isfinite(tried.last) or not math.isfinite(tried.peak) or tried.last < 0:
        return failed(numbers, fix="Clamp the schedule's factor to 0 and above.")
    if tried.whole:
        problem = _misses_configuration(run, tried, numbers)
        if problem is not None:
            return problem
    if tried.peak == 0:
        return warned(
            numbers, "the learning rate is 0 throughout", fix="Check the base rate and the factor."
        )
    return passed(numbers)


def _ended_early(run: Inspection, tried: DryRun, numbers: str) -> Answer:
    length = tried.fault_step - 1
    # A schedule as long as the epochs is stepped once an epoch, not once a step.
    if run.steps is None or length == run.number("epochs"):
        return passed(
            numbers, f"it is {length:,} steps long, as long as the run if stepped that often"
        )
    return failed(
        numbers,
        f"the schedule fails at step {tried.fault_step:,} of {tried.steps:,}: {tried.fault}",
        fix="Make the schedule at least as long as the run.",
    )


def _misses_configuration(run: Inspection, tried: DryRun, numbers: str) -> Answer | None:
    """Compare peak and end of a schedule that was tried to the end of the run."""
    try:
        wanted, said = configured_rate(run)
    except NotGiven:
        wanted = tried.peak
        said = ""
    if said and tried.peak > wanted and not same_rate(tried.peak, wanted):
        return failed(
            numbers,
            f"{said} is exceeded",
            fix="Give the schedule the configured peak, not a multiple.",
        )
    floor = run.number("min_lr")
    if floor is None or floor >= wanted or tried.last >= FAR_BELOW * floor:
        return None
    missed = f"{run.setting('min_lr')} is missed: the schedule ends at 0"
    if tried.last > 0:
        missed = (
            f"{run.setting('min_lr')} is meant as a learning rate, but the schedule ends "
            f"{floor / tried.last:.3g} times below it"
        )
    return failed(
        numbers,
        missed,
        fix="A LambdaLR takes factors: use max(factor, min_lr / lr), or "
        "CosineAnnealingLR(eta_min=min_lr).",
    )


@item("lr.checkpoint", "loading the checkpoint keeps the configured learning rate")
def checkpoint(run: Inspection) -> Answer:
    found = run.verified
    name = found.path.rpartition("/")[2]
    if not found.rates:
        raise NotApplicable(f"{name} holds neither optimizer nor scheduler state that can be read")
    try:
        wanted, configured = configured_rate(run)
        said = f"configured is {configured}"
    except NotGiven:
        wanted = max(peak_rates(run.optimizer))
        said = f"the optimizer has {wanted:.3g}"
    of_the_optimizer = _of_the_optimizer(found.rates)
    of_the_schedule = _of_the_schedule(found.rates)
    bad = []
    for rates in (of_the_optimizer, of_the_schedule):
        if rates and not any(same_rate(rate.value, wanted) for rate in rates):
            bad.append(f"{name}: {rates[0].name}={rates[0].value:.3g} comes back, {said}")
    if not bad:
        shown = (*of_the_optimizer, *of_the_schedule, *found.rates)[0]
        return passed(f"{name} holds {shown.name}={shown.value:.3g}, {said}")
    return failed(
        *bad,
        fix="After load_state_dict set lr, initial_lr, max_lr and min_lr of every group and the "
        "scheduler's base_lrs to the configured rate, or keep the old rate in the configuration.",
    )


def _of_the_optimizer(rates: tuple[Rate, ...]) -> list[Rate]:
    """Peak of OneCycleLR, else the base of another schedule, else the rate itself."""
    return _of_kind(rates, "max_lr") or _of_kind(rates, "initial_lr") or _of_kind(rates, "lr")


def _of_the_schedule(rates: tuple[Rate, ...]) -> list[Rate]:
    """The base that a LambdaLR and its like multiply."""
    # base_lrs of OneCycleLR are its low start, which it never uses again.
    if _of_kind(rates, "max_lr"):
        return []
    return _of_kind(rates, "base_lr")


def _of_kind(rates: tuple[Rate, ...], kind: str) -> list[Rate]:
    return [rate for rate in rates if rate.kind == kind]

"""`lr.schedule`: the schedule, tried to the end of the run on a copy, peaks and ends where the
configuration says.
"""

from __future__ import annotations

import inspect
import math

from stepguard.preflight.answers import Missing, Pointless, Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.lr_config import configured_rate, same_rate

FAR_BELOW = 0.1
"""A floor missed by more than a factor of ten is another floor."""


def _look(seen: Inspection) -> Seen:
    if "metrics" in inspect.signature(seen.scheduler.step).parameters:
        raise Pointless(
            f"{type(seen.scheduler).__name__} follows a metric, which is not known beforehand"
        )
    course = seen.course
    tried = f"{course.steps:,} steps tried" + (
        "" if course.whole else " (the length of the run is not configured)"
    )
    numbers = (
        f"{type(seen.scheduler).__name__}: starts at {course.first:.3g}, peaks at "
        f"{course.peak:.3g} in step "
        f"{course.peak_step:,}, ends at {course.last:.3g}; {tried}"
    )
    epochs = seen.number("epochs")
    if course.fault and (seen.steps is None or course.fault_step - 1 == epochs):
        return passed(
            numbers,
            f"it is {course.fault_step - 1:,} steps long, as long as the run if stepped that often",
        )
    if course.fault:
        where = f"step {course.fault_step:,} of {course.steps:,}: {course.fault}"
        return failed(
            numbers,
            f"the schedule fails at {where}",
            fix="Make the schedule at least as long as the run.",
        )
    if not math.isfinite(course.last) or not math.isfinite(course.peak) or course.last < 0:
        return failed(numbers, fix="Clamp the schedule's factor to 0 and above.")
    return _compared(seen, numbers)


def _compared(seen: Inspection, numbers: str) -> Seen:
    course, floor = seen.course, seen.number("min_lr")
    try:
        wanted, said = configured_rate(seen)
    except Missing:
        wanted, said = course.peak, ""
    if said and course.whole and not same_rate(course.peak, wanted) and course.peak > wanted:
        return failed(
            numbers,
            f"{said} is exceeded",
            fix="Give the schedule the configured peak, not a multiple.",
        )
    if floor is not None and course.whole and course.last < FAR_BELOW * floor and floor < wanted:
        return failed(
            numbers,
            f"{seen.setting('min_lr')} is meant as a learning rate, but the schedule ends "
            f"{floor / course.last:.3g} "
            "times below it"
            if course.last > 0
            else f"{seen.setting('min_lr')} is missed: the schedule ends at 0",
            fix="A LambdaLR takes factors: use max(factor, min_lr / lr), or "
            "CosineAnnealingLR(eta_min=min_lr).",
        )
    if course.peak == 0:
        return warned(
            numbers, "the learning rate is 0 throughout", fix="Check the base rate and the factor."
        )
    return passed(numbers)


ITEM = Item(
    id="lr.schedule", title="the schedule keeps to the configured rates to the end", look=_look
)

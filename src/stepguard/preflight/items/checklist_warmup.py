"""`checklist.warmup`: the schedule, tried on a copy, warms up long enough."""

from __future__ import annotations

import inspect

from stepguard.preflight.answers import Missing, Pointless, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

STEPS = 2000
SHARE = 0.01
"""Of the run: 2000 steps are meant for runs of 200 000."""


def _look(seen: Inspection) -> Seen:
    planned = seen.number("warmup")
    if seen.subject.optimizer is None and planned is not None and planned >= STEPS:
        return passed(f"{seen.setting('warmup')} is configured")
    if "adam" not in type(seen.optimizer).__name__.lower():
        raise Pointless(f"{type(seen.optimizer).__name__} has no second moment that has to settle")
    total = seen.steps
    wanted = min(STEPS, SHARE * total) if total else STEPS
    fix = (
        f"Warm up over {wanted:.0f} steps or more: LinearLR before the schedule, or "
        f"OneCycleLR(pct_start=...)."
    )
    if "metrics" in inspect.signature(getattr(seen.subject.scheduler, "step", len)).parameters:
        raise Pointless(
            f"{type(seen.subject.scheduler).__name__} follows a metric and knows no warmup"
        )
    try:
        course = seen.course
    except Missing:
        setting = seen.setting("warmup")
        configured = (
            f"{setting} is configured but there is no scheduler"
            if setting
            else "there is no scheduler"
        )
        return warned(f"{configured}: the first step takes the full rate", fix=fix)
    warm = course.peak_step if course.first < 0.5 * course.peak else 0
    said = f"{warm:,} steps from {course.first:.3g} to {course.peak:.3g}"
    if total:
        said += f", {100 * warm / total:.3g} % of {total:,}"
    return passed(said) if warm >= wanted else warned(said, fix=fix)


ITEM = Item(id="checklist.warmup", title="warmup is long enough (2000 steps or 1 %)", look=_look)

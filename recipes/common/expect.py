"""What the four modes must show for a recipe to count as working."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from recipes.common.outcome import Mode, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Place and cause of the first harmful value, and how near to healthy the guarded run ends."""

    metric: str
    """Name of the number that is compared."""
    causes: tuple[str, ...]
    ops: tuple[str, ...] = ()
    """Any of these aten packets is the right origin."""
    relative: float | None = None
    """The guarded metric may differ from the healthy one by this share of it ..."""
    absolute: float | None = None
    """... or by this much."""
    source: str | None = None
    """File the origin's line must be in."""
    higher_is_better: bool = False
    early: bool = False
    """The guard may see the ruin while everything is still finite: before the unguarded run's first
    bad step.
    """
    positive: tuple[str, ...] = ()
    """Of the numbers in `Outcome.also`, those that must be above 0 when guarded."""


def problems(expected: Expectation, outcomes: Mapping[Mode, Outcome]) -> list[str]:
    """Everything that is not as it should be, in words; empty when the recipe works."""
    healthy, guarded, unguarded = outcomes["healthy"], outcomes["guarded"], outcomes["unguarded"]
    found = []
    if healthy.first_bad is not None:
        found.append(f"the healthy run had a bad step at {healthy.first_bad}")
    if not (unguarded.bad_parameters or unguarded.bad_buffers):
        found.append("the unguarded run ended without a bad tensor, so nothing was survived")
    if guarded.bad_parameters or guarded.bad_buffers:
        found.append(
            f"guarded, {guarded.bad_parameters} parameters and {guarded.bad_buffers} buffers are "
            f"bad"
        )
    if not guarded.incidents:
        return [*found, "guarded, no incident was recorded"]
    found += _detection(expected, guarded, unguarded) + _origin(expected, guarded)
    if guarded.cause not in expected.causes:
        found.append(f"cause {guarded.cause or None}, expected one of {', '.join(expected.causes)}")
    if not _near(expected, healthy.metric, guarded.metric):
        found.append(
            f"{expected.metric} is {guarded.metric:.4g} guarded and {healthy.metric:.4g} healthy"
        )
    found += [
        f"{n} is {guarded.also[n]:.4g} guarded"
        for n in expected.positive
        if guarded.also.get(n, 1.0) <= 0.0
    ]
    return found


def _detection(expected: Expectation, guarded: Outcome, unguarded: Outcome) -> list[str]:
    if expected.early and guarded.first_bad is None:
        first, late = unguarded.first_bad, (guarded.detected or 0) >= (unguarded.first_bad or 0)
    else:
        first, late = guarded.first_bad, guarded.detected != guarded.first_bad
    return [f"first bad step {first}, detected at {guarded.detected}"] if late else []


def _origin(expected: Expectation, guarded: Outcome) -> list[str]:
    if expected.early and guarded.first_bad is None:
        return []  # nothing was non-finite yet, so there is no operation to name
    origin = guarded.incidents[0].origin
    found = []
    if origin is None or origin.op not in expected.ops:
        found.append(
            f"origin {origin.op if origin else None}, expected one of {', '.join(expected.ops)}"
        )
    if expected.source and (origin is None or file_of(origin.source) != expected.source):
        found.append(f"source {origin.source if origin else None}, expected {expected.source}")
    return found


def file_of(source: str | None) -> str:
    """`cond_unet.py` of `somewhere/cond_unet.py:25`."""
    return PurePath(source or "").name.partition(":")[0]


def _near(expected: Expectation, healthy: float, guarded: float) -> bool:
    if not (math.isfinite(healthy) and math.isfinite(guarded)):
        return False
    worse = healthy - guarded if expected.higher_is_better else guarded - healthy
    allowed = (
        expected.absolute
        if expected.absolute is not None
        else (expected.relative or 0.0) * abs(healthy)
    )
    return worse <= allowed

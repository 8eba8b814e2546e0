"""A step as named numbers for a logger. Never a non-finite number without a finite one that says
so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.records import Reading

PREFIX = "stepguard/"
NONFINITE = PREFIX + "nonfinite"
SKIPPED = PREFIX + "skipped"
INCIDENTS = PREFIX + "incidents"


def scalars(reading: Reading, *, committed: bool) -> dict[str, float]:
    """Everything seen in the step, non-finite values as they are, beside `nonfinite` and `skipped`
    of 0 or 1.
    """
    seen = {
        "loss": reading.loss,
        **{f"loss/{name}": value for name, value in reading.components.items()},
        **{f"followed/{name}": value for name, value in reading.followed.items()},
        "grad_norm": reading.grad_norm,
        **{"lr" if group == 0 else f"lr/{group}": rate for group, rate in enumerate(reading.lr)},
        "clip_factor": reading.clip_factor,
        "scale": reading.scale,
        "labels": reading.labels,
        "seconds": reading.seconds,
        "nonfinite": _hurt(reading),
        "skipped": not committed,
    }
    return {PREFIX + name: float(value) for name, value in seen.items() if value is not None}


def finite_only(values: dict[str, float]) -> dict[str, float]:
    """What is left for a backend that drops or distorts NaN and Inf; `nonfinite` says that
    something is missing.
    """
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _hurt(reading: Reading) -> bool:
    """Was anything of this step non-finite: a number, a gradient element, a stored tensor?"""
    numbers: Iterable[float | None] = (
        reading.loss,
        *reading.micro_losses,
        *reading.components.values(),
        *reading.followed.values(),
        reading.grad_norm,
        *reading.lr,
        reading.scale,
    )
    broken = any(number is not None and not math.isfinite(number) for number in numbers)
    return broken or not reading.grads_finite or bool(reading.bad_state)

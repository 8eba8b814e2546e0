"""A step as named numbers for a logger, with a finite one that tells of non-finite ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepguard.records import Reading

PREFIX = "stepguard/"
NONFINITE = PREFIX + "nonfinite"
SKIPPED = PREFIX + "skipped"
INCIDENTS = PREFIX + "incidents"


def scalars(reading: Reading, *, committed: bool) -> dict[str, float]:
    """Everything seen in the step, non-finite values included, with `nonfinite` and `skipped`."""
    seen: dict[str, float | None] = {"loss": reading.loss}
    for name, value in reading.components.items():
        seen[f"loss/{name}"] = value
    for name, value in reading.followed.items():
        seen[f"followed/{name}"] = value
    seen["grad_norm"] = reading.grad_norm
    for group, rate in enumerate(reading.lr):
        # The first group keeps the plain name: most runs have one only.
        seen["lr" if group == 0 else f"lr/{group}"] = rate
    seen["clip_factor"] = reading.clip_factor
    seen["scale"] = reading.scale
    seen["labels"] = reading.labels
    seen["seconds"] = reading.seconds
    seen["nonfinite"] = _any_nonfinite(reading)
    seen["skipped"] = not committed
    return {PREFIX + name: float(value) for name, value in seen.items() if value is not None}


def finite_only(values: dict[str, float]) -> dict[str, float]:
    """The values for a backend that drops or distorts NaN and Inf; `nonfinite` tells of them."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _any_nonfinite(reading: Reading) -> bool:
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
    if not reading.grads_finite or reading.bad_state:
        return True
    return any(number is not None and not math.isfinite(number) for number in numbers)

"""Pick numbers out of the step lines of a journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stepguard.report import phrases

StepLine = Mapping[str, Any]


def committed(lines: Iterable[StepLine]) -> list[StepLine]:
    """Steps whose update was made; journals before 0.1 do not say so and mean it."""
    return [line for line in lines if line.get("committed", True)]


def finite_values(lines: Iterable[StepLine], name: str) -> list[float]:
    """The values of one name, without missing and non-finite ones."""
    return [line[name] for line in lines if phrases.finite(line.get(name))]

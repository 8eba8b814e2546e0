"""Numbers and operands as the sentences of a finding say them."""

from __future__ import annotations

import math

from stepguard.diagnose.case import elements, high, low
from stepguard.diagnose.dtypes import FORMATS, plain
from stepguard.records import Operand


def spell(value: float | None) -> str:
    """A number in few digits, exact for whole ones a reader would recognise."""
    if value is None:
        return "unknown"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.6g}"


def describe(operand: Operand, label: str = "") -> str:
    """`other` (float32, shape (4, 1)) spans 0 to 1.13, 1 of 4 elements is 0."""
    name = f"`{label or operand.name or 'operand'}`"
    if not operand.shape and operand.min is None and operand.value is not None:
        return f"{name} is {spell(operand.value)}"
    kind = f"{plain(operand.dtype)}, " if operand.dtype else ""
    text = f"{name} ({kind}shape {operand.shape})"
    if not math.isnan(low(operand)):
        spans = low(operand) != high(operand)
        text += (
            f" spans {spell(low(operand))} to {spell(high(operand))}"
            if spans
            else f" is {spell(low(operand))}"
        )
    kinds = (
        ("nan", "posinf", "neginf", "zeros")
        if low(operand) != high(operand)
        else ("nan", "posinf", "neginf")
    )
    counted = [counts(operand, what) for what in kinds]
    parts = [part for part in counted if part]
    return text + (", with " + ", ".join(parts) if parts else "")


WORDS = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf", "zeros": "zero"}


def counts(operand: Operand, what: str) -> str:
    """`3 of 12 elements NaN`; empty when there is none."""
    number = int(getattr(operand, what))
    total = elements(operand)
    return f"{number} of {total} elements {WORDS[what]}" if number else ""


def at_index(operand: Operand) -> str:
    """` at index (3, 1)` where the element is known."""
    return f" at index {operand.index}" if operand.index else ""


def limit_of(dtype: str) -> str:
    """`65504, the largest float16`."""
    name = plain(dtype)
    return (
        f"{spell(FORMATS[name].largest)}, the largest {name}"
        if name in FORMATS
        else f"the largest {name}"
    )

"""Numbers and operands as the sentences of a finding say them."""

from __future__ import annotations

import math

from stepguard.diagnose.case import elements, high, low
from stepguard.diagnose.dtypes import FORMATS, plain
from stepguard.records import Operand

WORDS = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf", "zeros": "zero"}
NON_FINITE: tuple[str, ...] = ("nan", "posinf", "neginf")


def spell(value: float | None) -> str:
    """A number in few digits, exact for whole ones a reader would recognise."""
    if value is None:
        return "unknown"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.6g}"


def describe(operand: Operand | None, label: str = "") -> str:
    """`other` (float32, shape (4, 1)) spans 0 to 1.13, 1 of 4 elements is 0; empty for None."""
    if operand is None:
        return ""
    name = call(operand, label)
    is_python_number = not operand.shape and operand.min is None
    if is_python_number and operand.value is not None:
        return f"{name} is {spell(operand.value)}"
    kind = ""
    if operand.dtype:
        kind = f"{plain(operand.dtype)}, "
    text = f"{name} ({kind}shape {operand.shape}){_range(operand)}"
    kinds = NON_FINITE
    # of a tensor of one value, the range has said already whether that is 0
    if low(operand) != high(operand):
        kinds = (*NON_FINITE, "zeros")
    counted = counts(operand, kinds)
    if counted:
        return f"{text}, with {counted}"
    return text


def call(operand: Operand, label: str = "") -> str:
    """`duration` in quotes as the user wrote it, or the divisor in words."""
    name = label or operand.called or "operand"
    in_words = name.startswith(("the ", "what "))
    return name if in_words else f"`{name}`"


def _range(operand: Operand) -> str:
    if low(operand) == high(operand):
        return f" is {spell(low(operand))}"
    if math.isnan(low(operand)):
        return ""
    return f" spans {spell(low(operand))} to {spell(high(operand))}"


def counts(operand: Operand, kinds: tuple[str, ...] = NON_FINITE) -> str:
    """`3 of 12 elements NaN, 1 of 12 elements +inf`; empty when there is none."""
    total = elements(operand)
    parts = []
    for kind in kinds:
        number = int(getattr(operand, kind))
        if number:
            parts.append(f"{number} of {total} elements {WORDS[kind]}")
    return ", ".join(parts)


def at_index(operand: Operand) -> str:
    """` at index (3, 1)` where the element is known."""
    if operand.index:
        return f" at index {operand.index}"
    return ""


def broken_by(operand: Operand) -> str:
    """The element that broke the operation, where it is known."""
    if operand.index is None:
        return ""
    return f"the value that broke it is {spell(operand.value)}{at_index(operand)}"


def limit_of(dtype: str) -> str:
    """`65504, the largest float16`."""
    name = plain(dtype)
    if name not in FORMATS:
        return f"the largest {name}"
    return f"{spell(FORMATS[name].largest)}, the largest {name}"

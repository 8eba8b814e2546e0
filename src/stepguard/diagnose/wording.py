"""Numbers and operands as the sentences of a finding say them."""

from __future__ import annotations

import math

from stepguard.diagnose.case import elements, high, low
from stepguard.diagnose.dtypes import FORMATS, plain
from stepguard.records import Operand

WORDS = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf", "zeros": "zero"}
NON_FINITE = ("nan", "posinf", "neginf")


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
    is_python_number = not operand.shape and operand.min is None
    if is_python_number and operand.value is not None:
        return f"{name} is {spell(operand.value)}"
    kind = f"{plain(operand.dtype)}, " if operand.dtype else ""
    text = f"{name} ({kind}shape {operand.shape})"
    one_value = low(operand) == high(operand)
    if one_value:
        text += f" is {spell(low(operand))}"
    elif not math.isnan(low(operand)):
        text += f" spans {spell(low(operand))} to {spell(high(operand))}"
    counted = counts(operand, NON_FINITE if one_value else (*NON_FINITE, "zeros"))
    return f"{text}, with {counted}" if counted else text


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
    return f" at index {operand.index}" if operand.index else ""


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

"""Ranges of the floating-point formats, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """Largest finite number, smallest positive one, and bits of precision with the hidden one."""

    largest: float
    smallest: float
    bits: int


FORMATS = {
    "float64": Format(1.7976931348623157e308, 5e-324, 53),
    "float32": Format(3.4028234663852886e38, 1.401298464324817e-45, 24),
    "bfloat16": Format(3.3895313892515355e38, 9.183549615799121e-41, 8),
    "float16": Format(65504.0, 2.0**-24, 11),
    "float8_e5m2": Format(57344.0, 2.0**-16, 3),
    "float8_e4m3fn": Format(448.0, 2.0**-9, 4),
}
SHORT = frozenset(FORMATS) - {"float64", "float32"}
"""Half precision and below."""
NARROW = frozenset(name for name in SHORT if FORMATS[name].largest < 1e5)
"""Formats whose range ordinary activations can leave. bfloat16 is not one of them."""


def plain(dtype: str) -> str:
    """`torch.float16`, `complex64` -> the name of the real format underneath."""
    name = dtype.removeprefix("torch.")
    return {
        "complex32": "float16",
        "complex64": "float32",
        "complex128": "float64",
        "half": "float16",
    }.get(name, name)


def floating(dtype: str) -> bool:
    return plain(dtype) in FORMATS


def largest(dtype: str) -> float:
    """The limit of this dtype; infinite for an unknown one, so that nothing is claimed about it."""
    known = FORMATS.get(plain(dtype))
    if known:
        return known.largest
    return math.inf


def rounds_to_zero(value: float, dtype: str) -> bool:
    """True when this positive number is 0 once stored in this dtype."""
    known = FORMATS.get(plain(dtype))
    # exactly half of the smallest number is a tie, which rounds to the even 0
    return known is not None and 0 < abs(value) <= known.smallest / 2


def exp_limit(dtype: str, op: str = "exp") -> float:
    """The largest x whose exp(x), or exp2(x), is still finite."""
    limit = largest(dtype)
    if not math.isfinite(limit):
        return math.inf
    return math.log2(limit) if "exp2" in op else math.log(limit)

"""What a configuration means by its precision: a dtype, AMP without one, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepguard.preflight.settings.keys import Setting, find

SPELLINGS = {
    "float32": "no none false 32 32-true fp32 float32 float",
    "float16": "16 fp16 float16 half 16-mixed 16-true",
    "bfloat16": "bf16 bfloat16 bf16-mixed bf16-true",
    "float64": "64 64-true fp64 float64 double",
}
"""dtype -> how accelerate, Lightning, transformers and plain scripts spell it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The precision a configuration asks for."""

    dtype: str | None
    """None: it asks for mixed precision without naming the dtype."""
    said: str
    """`trainer.fp16=True`, with every setting that has a say."""


def meant(word: object) -> str | None:
    """`bf16-mixed` -> `bfloat16`; None for what is not a precision. Case does not matter."""
    plain = str(word).removeprefix("torch.").strip().lower()
    for dtype, spellings in SPELLINGS.items():
        if plain in spellings.split():
            return dtype
    return None


def wanted(settings: Mapping[str, Any]) -> Wanted | None:
    """Find the precision of the arithmetic; None if the configuration does not mention it."""
    named = find(settings, "mixed_precision")
    if named is not None:
        dtype = meant(named.value)
        if dtype is not None:
            return Wanted(dtype, str(named))
    flags = {}
    for name in ("fp16", "bf16", "amp"):
        setting = find(settings, name)
        if setting is not None:
            flags[name] = setting
    if not flags:
        return None
    said = ", ".join(map(str, flags.values()))
    if _is_on(flags.get("bf16")):
        return Wanted("bfloat16", said)
    if _is_on(flags.get("fp16")):
        return Wanted("float16", said)
    if _is_on(flags.get("amp")):
        return Wanted(None, said)
    return Wanted("float32", said)


def contradiction(settings: Mapping[str, Any]) -> str:
    """Name two settings of one configuration that exclude each other; empty if there are none."""
    fp16 = find(settings, "fp16")
    bf16 = find(settings, "bf16")
    if _is_on(fp16) and _is_on(bf16):
        return f"{fp16} and {bf16} exclude each other"
    named = find(settings, "mixed_precision")
    dtype = None
    if named is not None:
        dtype = meant(named.value)
    for flag, means in ((fp16, "float16"), (bf16, "bfloat16")):
        if _is_on(flag) and dtype not in (None, means):
            return f"{named} and {flag} exclude each other"
    return ""


def _is_on(flag: Setting | None) -> bool:
    """True for a flag that is set, also if its value is spelt as a string."""
    if flag is None:
        return False
    return str(flag.value).strip().lower() in ("true", "1", "yes", "on")

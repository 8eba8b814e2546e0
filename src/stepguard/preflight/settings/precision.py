"""What a configuration means by its precision: a dtype, AMP without one, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepguard.preflight.settings.keys import find

WORDS = {
    "no": "float32",
    "none": "float32",
    "false": "float32",
    "32": "float32",
    "32-true": "float32",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "16": "float16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "16-mixed": "float16",
    "16-true": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
    "64": "float64",
    "64-true": "float64",
    "fp64": "float64",
    "float64": "float64",
    "double": "float64",
}
"""Spelling in accelerate, Lightning, transformers and plain scripts -> dtype. Case does not matter.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one place asks for."""

    dtype: str | None
    """None: it asks for mixed precision without naming the dtype."""
    said: str
    """`trainer.fp16=True`, with every setting that has a say."""


def meant(word: object) -> str | None:
    """`bf16-mixed` -> `bfloat16`; None for what is no precision."""
    return WORDS.get(str(word).removeprefix("torch.").strip().lower())


def wanted(settings: Mapping[str, Any]) -> Wanted | None:
    """The arithmetic's precision a configuration asks for; None when it is silent."""
    named = find(settings, "mixed_precision")
    flags = {name: find(settings, name) for name in ("fp16", "bf16", "amp")}
    said = ", ".join(str(flag) for flag in flags.values() if flag is not None)
    on = {name: truth(flag.value) for name, flag in flags.items() if flag is not None}
    if named is not None and (dtype := meant(named.value)) is not None:
        return Wanted(dtype, str(named))
    if on.get("fp16") or on.get("bf16"):
        return Wanted("bfloat16" if on.get("bf16") else "float16", said)
    if on.get("amp"):
        return Wanted(None, said)
    return Wanted("float32", said) if on else None


def contradiction(settings: Mapping[str, Any]) -> str:
    """Two settings of one configuration that exclude each other."""
    fp16, bf16, named = (find(settings, name) for name in ("fp16", "bf16", "mixed_precision"))
    on = [flag for flag in (fp16, bf16) if flag is not None and truth(flag.value)]
    if len(on) == 2:
        return f"{on[0]} and {on[1]} exclude each other"
    dtype = meant(named.value) if named is not None else None
    for flag, means in ((fp16, "float16"), (bf16, "bfloat16")):
        if dtype is not None and flag is not None and truth(flag.value) and dtype != means:
            return f"{named} and {flag} exclude each other"
    return ""


def truth(value: object) -> bool:
    """A flag that may be spelt as a string."""
    return str(value).strip().lower() in ("true", "1", "yes", "on")

"""Records to strict JSON and back: NaN and Inf become null beside a `<field>_kind` that says which."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

Record = TypeVar("Record")

KIND_SUFFIX = "_kind"


@cache
def _adapter(cls: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def to_jsonable(record: object) -> dict[str, Any]:
    """The record as plain values that `json.dumps(allow_nan=False)` takes."""
    plain = _adapter(type(record)).dump_python(record, mode="python")
    strict = strict_json(plain)
    assert isinstance(strict, dict)
    return strict


def from_jsonable(cls: type[Record], value: dict[str, Any]) -> Record:
    """Rebuild a record; raises pydantic's ValidationError where a field does not fit."""
    record: Record = _adapter(cls).validate_python(restore_floats(value))
    return record


def dumps(value: dict[str, Any]) -> str:
    """One line of strict JSON."""
    return json.dumps(strict_json(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def float_kind(value: float) -> str | None:
    """`nan`, `inf`, `-inf`, or None for a finite number."""
    if math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def strict_json(value: Any) -> Any:
    """Plain containers with every non-finite float replaced by null and named beside it."""
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for key, item in value.items():
            name = str(key)
            out[name] = strict_json(item)
            kind = _kind_of(item)
            if kind is not None:
                out[name + KIND_SUFFIX] = kind
        return out
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _kind_of(value: Any) -> str | list[str | None] | None:
    if isinstance(value, float):
        return float_kind(value)
    if isinstance(value, list | tuple) and any(isinstance(v, float) and not math.isfinite(v) for v in value):
        return [float_kind(v) if isinstance(v, float) else None for v in value]
    return None


def restore_floats(value: Any) -> Any:
    """The inverse of `strict_json`."""
    if isinstance(value, list):
        return [restore_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, item in value.items():
        owner = key.removesuffix(KIND_SUFFIX)
        if owner != key and owner in value and _is_kind(item, value[owner]):
            continue
        out[key] = _restore(item, value.get(key + KIND_SUFFIX))
    return out


def _is_kind(kind: Any, owner: Any) -> bool:
    return (owner is None and kind in ("nan", "inf", "-inf")) or (isinstance(owner, list) and isinstance(kind, list))


def _restore(item: Any, kind: Any) -> Any:
    if item is None and kind in ("nan", "inf", "-inf"):
        return float(kind)
    if isinstance(item, list) and isinstance(kind, list):
        return [float(k) if k is not None else restore_floats(v) for v, k in zip(item, kind, strict=True)]
    return restore_floats(item)

"""Records to strict JSON and back: NaN and Inf become null beside a `<field>_kind` that says which.

A key that itself ends in `_kind` and could be taken for such a companion gets a `~` at its end, removed on reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import TypeAdapter

Record = TypeVar("Record")

KIND_SUFFIX = "_kind"
KINDS = ("nan", "inf", "-inf")
_ESCAPED = re.compile(r"_kind~+$")
_ESCAPABLE = re.compile(r"_kind~*$")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    """Building one takes a millisecond, so each record type has one for ever."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


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
    """One line of strict JSON, always encodable: what UTF-8 cannot hold (undecodable file names) stays escaped."""
    text = json.dumps(strict_json(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def float_kind(value: float) -> str | None:
    """`nan`, `inf`, `-inf`, or None for a finite number."""
    if math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def strict_json(value: Any) -> Any:
    """Plain containers with every non-finite float of a dict replaced by null and named beside it."""
    if isinstance(value, dict):
        return _strict_dict({str(key): item for key, item in value.items()})
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _strict_dict(value: dict[str, Any]) -> dict[str, Any]:
    escape = _needs_escape(value)
    out: dict[str, Any] = {}
    for key, item in value.items():
        name = key + "~" if escape and _ESCAPABLE.search(key) else key
        out[name] = strict_json(item)
        kind = _kind_of(item)
        if kind is not None:
            out[name + KIND_SUFFIX] = kind
    return out


def _needs_escape(value: dict[str, Any]) -> bool:
    """Could a key of the user's be taken for the companion of another one?"""
    suspects = [key for key in value if KIND_SUFFIX in key]
    return any(_ESCAPED.search(key) or any(owner in value for owner in _owners(key)) for key in suspects)


def _owners(key: str) -> Iterator[str]:
    while key.endswith(KIND_SUFFIX):
        key = key.removesuffix(KIND_SUFFIX)
        yield key


def _kind_of(value: Any) -> str | list[Any] | None:
    """The companion of a value: a name for a float, a list of companions for a list that holds any."""
    if isinstance(value, float):
        return float_kind(value)
    if isinstance(value, list | tuple):
        kinds = [_kind_of(item) for item in value]
        return kinds if any(kind is not None for kind in kinds) else None
    return None


def restore_floats(value: Any) -> Any:
    """The inverse of `strict_json`."""
    if isinstance(value, list):
        return [restore_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    escaped = any(_ESCAPED.search(key) for key in value)
    out: dict[str, Any] = {}
    for key, item in value.items():
        owner = key.removesuffix(KIND_SUFFIX)
        if owner != key and owner in value and _is_kind(item, value[owner]):
            continue
        name = key[:-1] if escaped and _ESCAPED.search(key) else key
        out[name] = _restore(item, value.get(key + KIND_SUFFIX))
    return out


def _is_kind(kind: Any, owner: Any) -> bool:
    if isinstance(owner, list) and isinstance(kind, list):
        return len(owner) == len(kind)
    return owner is None and kind in KINDS


def _restore(item: Any, kind: Any) -> Any:
    if item is None and kind in KINDS:
        return float(kind)
    if isinstance(item, list) and isinstance(kind, list) and len(item) == len(kind):
        return [_restore(part, part_kind) for part, part_kind in zip(item, kind, strict=True)]
    return restore_floats(item)

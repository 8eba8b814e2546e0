"""Records to strict JSON and back: NaN and Inf become null beside a `<field>_kind` that says which.

Where the name of that companion is taken (loss components have the user's names) the value itself
becomes `{"~float": "nan"}`. Writing twice changes nothing: what is strict already stays as it is.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from pydantic import TypeAdapter

Record = TypeVar("Record")

KIND_SUFFIX = "_kind"
IN_PLACE = "~float"
KINDS = ("nan", "inf", "-inf")
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    """Building one takes a millisecond, so each record type has one for ever."""
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def to_plain(record: object) -> dict[str, Any]:
    """The record as nested dicts, floats as they are: what `dumps` and `Journal.write` take."""
    plain: dict[str, Any] = _adapter(type(record)).dump_python(record, mode="python")
    return plain


def to_jsonable(record: object) -> dict[str, Any]:
    """The record as plain values that `json.dumps(allow_nan=False)` takes."""
    strict = strict_json(to_plain(record))
    assert isinstance(strict, dict)
    return strict


def from_jsonable(cls: type[Record], value: dict[str, Any]) -> Record:
    """Rebuild a record; raises pydantic's ValidationError where a field does not fit."""
    record: Record = _adapter(cls).validate_python(restore_floats(value))
    return record


def dumps(value: dict[str, Any]) -> str:
    """One line of strict JSON for every reader: what ends lines or does not fit UTF-8 stays
    escaped.
    """
    text = json.dumps(
        strict_json(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False
    )
    return (
        text
        if text.isascii()
        else text.translate(_LINE_ENDS).encode("utf-8", "backslashreplace").decode()
    )


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
    out: dict[str, Any] = {}
    for key, item in value.items():
        kind = _kind_of(item)
        if kind is None:
            out[key] = strict_json(item)
        elif any(other.startswith(key + KIND_SUFFIX) for other in value):
            out[key] = _in_place(item)
        else:
            out[key], out[key + KIND_SUFFIX] = strict_json(item), kind
    return out


def _in_place(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_in_place(item) for item in value]
    return {IN_PLACE: float_kind(value)} if _kind_of(value) is not None else strict_json(value)


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
    if value.keys() == {IN_PLACE} and _is_kind(value[IN_PLACE], None):
        return float(value[IN_PLACE])
    out: dict[str, Any] = {}
    for key, item in value.items():
        owner = key.removesuffix(KIND_SUFFIX)
        if owner != key and owner in value and _is_kind(item, value[owner]):
            continue
        kind = value.get(key + KIND_SUFFIX)
        out[key] = _restore(item, kind) if _is_kind(kind, item) else restore_floats(item)
    return out


def _is_kind(kind: Any, owner: Any) -> bool:
    """Is it the companion of this value? Then it names a kind only where a value is null."""
    if isinstance(kind, list):
        if (
            not isinstance(owner, list)
            or len(owner) != len(kind)
            or all(part is None for part in kind)
        ):
            return False
        return all(
            part is None or _is_kind(part, place) for part, place in zip(kind, owner, strict=True)
        )
    return owner is None and isinstance(kind, str) and kind in KINDS


def _restore(item: Any, kind: Any) -> Any:
    if isinstance(kind, list):
        return [_restore(part, part_kind) for part, part_kind in zip(item, kind, strict=True)]
    return float(kind) if kind is not None else restore_floats(item)

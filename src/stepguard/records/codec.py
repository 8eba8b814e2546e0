"""Records to strict JSON and back: NaN and Inf become null beside a `<field>_kind` that says which.

Where the name of that companion is taken (loss components have the user's names) the value itself
becomes `{"~float": "nan"}`. What is strict already stays as it is.

pydantic's `ser_json_inf_nan` writes null without the kind, or "NaN" in place of the number. Neither
is the journal's schema, which must stay readable for plots that expect a number or null.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

from pydantic import TypeAdapter

from stepguard.records.text import UNPRINTABLE

Record = TypeVar("Record")

KIND_SUFFIX = "_kind"
IN_PLACE = "~float"
KINDS = ("nan", "inf", "-inf")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    # Building one takes a millisecond, so each record type keeps its own.
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


PRIVATE: dict[str, Any] = {"Incident": {"origin": {"excerpt"}}, "Origin": {"excerpt"}}
"""What never leaves the process."""


def to_plain(record: object) -> dict[str, Any]:
    """The record as nested dicts, floats as they are: what `dumps` and `Journal.write` take."""
    private = PRIVATE.get(type(record).__name__)
    plain: dict[str, Any] = _adapter(type(record)).dump_python(
        record, mode="python", exclude=private
    )
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
    """One line of strict JSON; what ends lines elsewhere or controls a terminal is escaped."""
    strict = strict_json(value)
    text = json.dumps(strict, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # Some readers also break lines at U+2028; lone surrogates come from file names that are not
    # UTF-8; a journal may be printed with `cat`.
    return UNPRINTABLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    # Above U+FFFF JSON has pairs of surrogates only.
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"


def float_kind(value: float) -> str | None:
    """`nan`, `inf`, `-inf`, or None for a finite number."""
    if math.isfinite(value):
        return None
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def strict_json(value: Any) -> Any:
    """Replace every non-finite float in plain containers by null, named beside it."""
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
            out[key] = strict_json(item)
            out[key + KIND_SUFFIX] = kind
    return out


def _in_place(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_in_place(item) for item in value]
    if _kind_of(value) is None:
        return strict_json(value)
    return {IN_PLACE: float_kind(value)}


def _kind_of(value: Any) -> str | list[Any] | None:
    """The companion of a value: a kind for a float, a list of them for a list; None if finite."""
    if isinstance(value, float):
        return float_kind(value)
    if not isinstance(value, list | tuple):
        return None
    kinds = [_kind_of(item) for item in value]
    if all(kind is None for kind in kinds):
        return None
    return kinds


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
        if not _is_companion(key, value):
            out[key] = _restore(item, value.get(key + KIND_SUFFIX))
    return out


def _is_companion(key: str, fields: dict[str, Any]) -> bool:
    """Is this the `<field>_kind` of another field?"""
    owner = key.removesuffix(KIND_SUFFIX)
    return owner != key and owner in fields and _is_kind(fields[key], fields[owner])


def _is_kind(kind: Any, owner: Any) -> bool:
    """Is `kind` the companion of this value? It names a kind only where a value is null."""
    if not isinstance(kind, list):
        return owner is None and isinstance(kind, str) and kind in KINDS
    if not isinstance(owner, list) or len(owner) != len(kind):
        return False
    named = [place for place, part in enumerate(kind) if part is not None]
    return bool(named) and all(_is_kind(kind[place], owner[place]) for place in named)


def _restore(item: Any, kind: Any) -> Any:
    """The value with the floats that its companion names; without one, as it is."""
    if not _is_kind(kind, item):
        return restore_floats(item)
    if isinstance(kind, list):
        return [_restore(part, named) for part, named in zip(item, kind, strict=True)]
    return float(kind)

"""Safetensors files: the header is checked as strictly as the format demands."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from stepguard.records.verification import Role
from stepguard.verification import dtype_names, limits, roles
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged
from stepguard.verification.file_layout import FileLayout
from stepguard.verification.format_entry import FileFormat
from stepguard.verification.pickle_values import StorageRecord, TensorRecord

SUFFIX = ".safetensors"
METADATA = "__metadata__"
"""The one key of the header that is not a tensor."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """What the header says about one tensor; the offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_safetensors(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    """Fill the layout; raises Damaged where the header cannot be trusted."""
    entries, data = _header(source)
    size = source.size - data
    end = 0
    # the format demands that tensors fill the file without gaps and overlaps: a gap can hide
    # other content, and tensors that share bytes make a small file need much memory
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise Damaged(
                "malformed",
                f"{entry.name!r} begins at byte {entry.start:,} of the data, the one before ends "
                f"at {end:,}",
            )
        if entry.stop > size:
            raise Damaged(
                "torn",
                f"{entry.name!r} should end at byte {data + entry.stop:,}, the file ends at "
                f"{source.size:,}",
            )
        end = entry.stop
        _add_tensor(layout, entry, data, role)
    if end < size:
        raise Damaged("malformed", f"{size - end:,} bytes follow the last tensor")


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON strictly about doubled keys; NaN is accepted, trainer_state.json holds it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            doubled = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise Damaged("duplicate", f"{what} names {doubled[:80]!r} more than once")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise Damaged("limit", f"{what} is nested too deep") from None
    except (ValueError, UnicodeError) as error:
        raise Damaged("malformed", f"{what} is not JSON: {str(error)[:120]}") from None


def _header(source: FileSlice) -> tuple[list[HeaderEntry], int]:
    """Return the entries of the header, and the offset at which the data begins."""
    if source.size < 8:
        raise Damaged("torn", f"has {source.size} bytes; a safetensors file begins with a header")
    length = int.from_bytes(source.exactly(0, 8), "little")
    if length > source.size - 8:
        raise Damaged(
            "torn", f"its header should have {length:,} bytes, the file has {source.size:,}"
        )
    if length > limits.LARGEST_HEADER:
        raise Damaged(
            "limit",
            f"its header of {length:,} bytes is more than the {limits.LARGEST_HEADER:,} that are "
            f"read",
        )
    header = parse_json(source.exactly(8, length), "its header")
    if not isinstance(header, dict):
        raise Damaged("malformed", f"its header is a JSON {type(header).__name__}, not an object")
    header.pop(METADATA, None)
    return [_entry(name, facts) for name, facts in header.items()], 8 + length


def _entry(name: str, facts: Any) -> HeaderEntry:
    unusable = Damaged("malformed", f"its header says nothing usable on {name[:80]!r}")
    try:
        start, stop = facts["data_offsets"]
        entry = HeaderEntry(name, facts["dtype"], tuple(facts["shape"]), start, stop)
    except (KeyError, TypeError, ValueError):
        raise unusable from None
    if not limits.is_shape(entry.shape) or not limits.is_shape((start, stop)):
        raise unusable
    if min(start, stop, *entry.shape) < 0 or start > stop or not isinstance(entry.dtype, str):
        raise unusable
    return entry


def _add_tensor(layout: FileLayout, entry: HeaderEntry, data: int, context: Role | None) -> None:
    name = entry.name
    bits = dtype_names.SAFETENSORS_BITS.get(entry.dtype)
    dtype = dtype_names.SAFETENSORS.get(entry.dtype, "uint8")
    if bits is None:
        if entry.dtype not in dtype_names.SAFETENSORS:
            detail = f"has elements of type {entry.dtype[:20]!r}, which is not known"
            layout.problems.add("format", detail, tensor=name)
            return
        bits = 8 * dtype_names.SIZES[dtype]
    size = entry.stop - entry.start
    needed = -(-math.prod(entry.shape) * bits // 8)
    if needed != size:
        detail = f"has {size:,} bytes, its shape needs {needed:,}"
        layout.problems.add("malformed", detail, tensor=name)
        return
    role = roles.of_tensor(context or _role_of_part(name), name, dtype)
    start = data + entry.start
    layout.add_tensor(name, role, dtype, entry.shape, start, start, size)


def _role_of_part(name: str) -> Role | None:
    """Read the role from `optimizer/...`; a name without a slash is the model's or its EMA's."""
    part, slash, _ = name.partition("/")
    role = roles.named(part)
    if slash or role == "ema":
        return role
    return None


def _is_safetensors(source: FileSlice, suffix: str) -> bool:
    if suffix == SUFFIX:
        return True
    head = source.at(0, 9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= source.size


def _content(source: FileSlice) -> dict[str, TensorRecord]:
    found = {}
    for entry in _header(source)[0]:
        storage = StorageRecord(entry.name, entry.dtype, math.prod(entry.shape))
        found[entry.name] = TensorRecord(storage, entry.dtype, 0, entry.shape, ())
    return found


SAFETENSORS = FileFormat(
    name="safetensors",
    matches=_is_safetensors,
    read=read_safetensors,
    read_content=_content,
    suffixes=frozenset({SUFFIX}),
)

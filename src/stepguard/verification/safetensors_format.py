"""Safetensors files: the header is checked as strictly as the format says, the tensors are given
their places.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from stepguard.records.verification import Role
from stepguard.verification import dtype_names, limits, roles
from stepguard.verification.bounded_file import Window
from stepguard.verification.damage import Damaged
from stepguard.verification.file_layout import Layout, elements


def read_safetensors(window: Window, layout: Layout, role: Role | None) -> None:
    """Fill the layout; raises Damaged where the header cannot be trusted."""
    header, data = _header(window)
    size = window.size - data
    end = 0
    for name, start, stop, dtype, shape in sorted(
        _entries(header), key=lambda entry: (entry[1], entry[2])
    ):
        if start != end:
            raise Damaged(
                "malformed",
                f"{name!r} begins at byte {start:,} of the data, the one before ends at {end:,}",
            )
        if stop > size:
            raise Damaged(
                "torn",
                f"{name!r} should end at byte {data + stop:,}, the file ends at {window.size:,}",
            )
        end = stop
        _place(layout, name, start + data, stop - start, dtype, shape, role)
    if end != size:
        detail = f"{size - end:,} bytes follow the last tensor"
        raise Damaged("malformed" if end < size else "torn", detail)


def _header(window: Window) -> tuple[dict[str, Any], int]:
    if window.size < 8:
        raise Damaged("torn", f"has {window.size} bytes; a safetensors file begins with a header")
    length = int.from_bytes(window.read(8), "little")
    if length > window.left:
        raise Damaged(
            "torn", f"its header should have {length:,} bytes, the file has {window.size:,}"
        )
    if length > limits.LARGEST_HEADER:
        raise Damaged(
            "limit",
            f"its header of {length:,} bytes is more than the {limits.LARGEST_HEADER:,} that are "
            f"read",
        )
    header = parse_json(window.read(length), "its header")
    if not isinstance(header, dict):
        raise Damaged("malformed", f"its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def parse_json(text: bytes, what: str) -> Any:
    """Strict about doubled keys; NaN is let through, trainer_state.json holds it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise Damaged("duplicate", f"{what} names {twice[:80]!r} more than once")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise Damaged("limit", f"{what} is nested too deep") from None
    except (ValueError, UnicodeError) as error:
        raise Damaged("malformed", f"{what} is no JSON: {str(error)[:120]}") from None


def _entries(header: dict[str, Any]) -> list[tuple[str, int, int, str, tuple[int, ...]]]:
    found = []
    for name, entry in header.items():
        try:
            start, stop = entry["data_offsets"]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            fits = all(type(n) is int and n >= 0 for n in (start, stop, *shape)) and start <= stop
            fits = fits and isinstance(dtype, str) and len(shape) <= limits.LARGEST_DIMENSIONS
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise Damaged("malformed", f"its header says nothing usable on {name[:80]!r}")
        found.append((name, start, stop, dtype, shape))
    return found


def _place(
    layout: Layout,
    name: str,
    start: int,
    size: int,
    dtype: str,
    shape: tuple[int, ...],
    context: Role | None,
) -> None:
    bits = dtype_names.SAFETENSORS_BITS.get(dtype)
    known = dtype_names.SAFETENSORS.get(dtype, "uint8")
    if bits is None and dtype not in dtype_names.SAFETENSORS:
        layout.notes.add(
            "format", f"has elements of type {dtype[:20]!r}, which is not known", tensor=name
        )
        return
    needed = -(-elements(shape) * bits // 8) if bits else elements(shape) * dtype_names.SIZES[known]
    if needed != size:
        layout.notes.add(
            "malformed", f"has {size:,} bytes, its shape needs {needed:,}", tensor=name
        )
        return
    part, slash, _ = name.partition("/")
    within = context or roles.named(part)
    if not slash and within != "ema" and context is None:
        within = None  # without a folder in its name it is the model's own
    layout.look(name, roles.of_tensor(within, name, known), known, shape, start, start, size)

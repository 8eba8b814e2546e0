"""Add the value of a pickle to a file layout: offsets of its tensors, names not on the list."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stepguard.records.verification import Role
from stepguard.report.phrases import first_few
from stepguard.verification import dtype_names, pickle_contents
from stepguard.verification.damage import Damaged
from stepguard.verification.file_layout import FileLayout
from stepguard.verification.pickle_contents import PickleContents, PickledTensor
from stepguard.verification.pickle_globals import Trust, trust
from stepguard.verification.pickle_machine import PickleReferences
from stepguard.verification.pickle_stream import ByteRange
from stepguard.verification.pickle_values import ArrayRecord, TensorRecord

NEEDLESS = "which a checkpoint of tensors does not need"


def add_pickle(
    layout: FileLayout,
    value: Any,
    storages: dict[str, ByteRange],
    role: Role | None,
    prefix: str = "",
) -> PickleContents:
    """Add everything that the value of a pickle says: rates, numbers and tensors."""
    contents = pickle_contents.walk(value, layout.problems, role)
    layout.add_contents(contents)
    for tensor in contents.tensors:
        add_tensor(layout, tensor, storages, prefix)
    return contents


@contextmanager
def names_reported(layout: FileLayout, seen: PickleReferences) -> Iterator[None]:
    """Report every name that is not on the list, also where reading stops before the end."""
    try:
        yield
    finally:
        names = _by_trust(seen)
        for hostile in names.get("hostile", ()):
            layout.problems.add(
                "hostile",
                f"names {hostile}, {NEEDLESS}; loading it with pickle could run code; "
                "nothing was run",
            )
        for called_class in names.get("calls", ()):
            layout.problems.add(
                "global",
                f"names {called_class}, {NEEDLESS}; loading it with pickle would call it with "
                "arguments from the file. Where it is a class of your own, save its value instead",
            )
        unknown = names.get("unknown")
        if unknown:
            layout.problems.add(
                "global",
                f"names {first_few(unknown, 5)}, {NEEDLESS}; loading it with pickle would import "
                "and run code that is not on the list of stepguard. Where it is your own, save "
                "the state_dict instead of the object",
            )


@contextmanager
def hostile_refused(seen: PickleReferences) -> Iterator[None]:
    """Raise Damaged for a pickle that was made to run code."""
    try:
        yield
    finally:
        hostile = _by_trust(seen).get("hostile")
        if hostile:
            raise Damaged(
                "hostile",
                f"it names {first_few(hostile, 5)}, {NEEDLESS}; loading it with pickle could run "
                "code",
            )


def _by_trust(seen: PickleReferences) -> dict[Trust, list[str]]:
    names: dict[Trust, list[str]] = {}
    for name, called in seen.names.items():
        names.setdefault(trust(name, called=called, scripted=seen.scripted), []).append(str(name))
    return names


def add_tensor(
    layout: FileLayout, tensor: PickledTensor, storages: dict[str, ByteRange], prefix: str = ""
) -> None:
    """Add a tensor with its bytes in the file, unless those are in a nested pickle."""
    name = f"{prefix}{tensor.name}"
    if not tensor.name:
        name = prefix.rstrip("/")
    record = tensor.record
    if isinstance(record, ArrayRecord):
        _add_array(layout, name, tensor.role, record)
    elif isinstance(record, TensorRecord) and record.storage.nested is None:
        _add_view(layout, name, tensor.role, record, storages)


def _add_array(layout: FileLayout, name: str, role: Role, array: ArrayRecord) -> None:
    if array.raw is None or array.raw.start < 0 or not array.dtype:
        return
    size = math.prod(array.shape) * dtype_names.SIZES[array.dtype]
    if size != array.raw.size:
        layout.problems.add(
            "malformed", f"has {array.raw.size:,} bytes, its shape needs {size:,}", tensor=name
        )
        return
    start = array.raw.start
    layout.add_tensor(name, role, array.dtype, array.shape, start, start, size)


def _add_view(
    layout: FileLayout,
    name: str,
    role: Role,
    tensor: TensorRecord,
    storages: dict[str, ByteRange],
) -> None:
    storage = tensor.storage
    size = storage.elements * dtype_names.SIZES[storage.dtype]
    where = storages.get(storage.key)
    if where is None:
        # torch writes no record for a storage without bytes
        if size:
            detail = f"its storage {storage.key} is not in the file"
            layout.problems.add("missing", detail, tensor=name, role=role)
        return
    if where.size != size:
        detail = (
            f"its storage {storage.key} has {where.size:,} bytes in the file and "
            f"{size:,} in the pickle"
        )
        layout.problems.add("torn", detail, tensor=name, role=role)
        return
    width = dtype_names.SIZES[tensor.dtype]
    extent = _extent(tensor)
    if extent is None or (tensor.offset + extent) * width > where.size:
        detail = (
            f"shape {tensor.shape[:8]} at offset {tensor.offset} does not fit into its "
            f"storage of {where.size:,} bytes"
        )
        layout.problems.add("malformed", detail, tensor=name, role=role)
        return
    start = where.start + tensor.offset * width
    layout.add_tensor(name, role, tensor.dtype, tensor.shape, start, where.start, extent * width)


def _extent(tensor: TensorRecord) -> int | None:
    """Count elements from the first to the last one; None for sizes that no tensor has."""
    if len(tensor.shape) != len(tensor.stride):
        return None
    if min(tensor.offset, *tensor.shape, *tensor.stride, 0) < 0:
        return None
    if 0 in tensor.shape:
        return 0
    # as torch's as_strided: dimensions may overlap, a stride of 0 repeats one element
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))

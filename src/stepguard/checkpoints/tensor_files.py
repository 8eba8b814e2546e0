"""Read the tensors of a checkpoint, each proven against the seal, whole or the part that is wanted.

Where several ranks have written, each file holds parts of tensors. Which of them make up the part
that a rank of another mesh wants is worked out by torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.file_plan import (
    FilePlan,
    TensorForm,
    form_from_seal,
    plan_file,
    stored_order,
)
from stepguard.checkpoints.pieces import PIECE, empty_tensor
from stepguard.checkpoints.seal import FACTS, Seal, SealedPart, open_plain
from stepguard.tensors.sharding import TensorPart, whole_part

Select = Callable[[str, tuple[int, ...]], TensorPart | None]
"""Takes the name and the whole shape of a tensor; returns the part to read, None for nothing."""


def read_tensors(
    path: Path,
    seals: Sequence[Seal],
    device: torch.device | str | None = None,
    select: Select | None = None,
) -> dict[str, Tensor]:
    """Read every tensor, or the parts that `select` asks for."""
    if select is None and not any(seal.parts for seal in seals):
        return {
            name: tensor
            for seal in seals
            for name, tensor in _read_whole(path, seal, device).items()
        }
    return _read_parts(path, seals, device, select or _all_of_it)


def _all_of_it(name: str, shape: tuple[int, ...]) -> TensorPart | None:
    return whole_part(shape)


# --- a checkpoint of one process


def _read_whole(path: Path, seal: Seal, device: torch.device | str | None) -> dict[str, Tensor]:
    plans, forms = _planned(path, seal)
    _check_before_reading(path, seal, plans)
    tensors: dict[str, Tensor] = {}
    for plan in plans:
        tensors.update(_read_file(path / plan.name, plan, seal, forms, device))
    return {name: tensors[sealed.same_as or name] for name, sealed in seal.tensors.items()}


def _planned(path: Path, seal: Seal) -> tuple[list[FilePlan], dict[str, TensorForm]]:
    """How the tensors of a seal must lie in its files."""
    forms: dict[str, TensorForm] = {}
    names_of: dict[str, list[str]] = {}
    try:
        for name, sealed in seal.tensors.items():
            if sealed.same_as is None:
                forms[name] = form_from_seal(sealed.dtype, sealed.shape)
                names_of.setdefault(sealed.file, []).append(name)
    except ValueError as fault:
        raise StoreError(f"{path} cannot be read: {fault}.") from None
    plans = []
    for file in sorted(seal.files.keys() - {FACTS}):
        plans.append(plan_file(file, stored_order(names_of.get(file, ()), forms), forms))
    return plans, forms


def _check_before_reading(path: Path, seal: Seal, plans: list[FilePlan]) -> None:
    """Refuse all that can be known to be wrong before memory is taken for it."""
    _check_names(path, seal, plans)
    for plan in plans:
        _check_size(path, seal, plan)
    needed = sum(plan.size for plan in plans)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > installed:
        raise StoreError(f"{path} needs {needed} bytes of memory; this machine has {installed}.")


def _check_names(path: Path, seal: Seal, plans: list[FilePlan]) -> None:
    """Refuse a seal whose shared tensors differ from those they share, or that are in no file."""
    planned = {name for plan in plans for name in plan.names}
    for name, sealed in seal.tensors.items():
        first = sealed.same_as or name
        if first not in planned or seal.tensors[first] != replace(sealed, same_as=None):
            raise StoreError(
                f"{path} has a seal that contradicts itself: {name} is in no file as it is "
                f"described."
            )


def _check_size(path: Path, seal: Seal, plan: FilePlan) -> None:
    if plan.size != seal.files[plan.name].size:
        raise StoreError(
            f"{path} has a seal that contradicts itself: {plan.name} cannot have the size it gives."
        )
    descriptor, size = open_plain(path / plan.name)
    os.close(descriptor)
    if size != plan.size:
        raise StoreError(
            f"{path} is not whole: {plan.name} has {size} bytes, {plan.size} were sealed."
        )


def _read_file(
    path: Path,
    plan: FilePlan,
    seal: Seal,
    forms: dict[str, TensorForm],
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    descriptor, _ = open_plain(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        header = file.read(len(plan.header))
        if header != plan.header:
            raise StoreError(f"{path} is not what was sealed: its header differs.")
        whole = xxhash.xxh3_128(header)
        for name in plan.names:
            tensor, view = empty_tensor(forms[name])
            digest = xxhash.xxh3_128()
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                _fill(file.fileno(), piece, path)
                digest.update(piece)
                whole.update(piece)
            if digest.hexdigest() != seal.tensors[name].digest:
                raise StoreError(f"{path} is not what was sealed: {name} differs.")
            yield name, tensor if device is None else tensor.to(device)
        if whole.hexdigest() != seal.files[plan.name].digest:
            raise StoreError(f"{path} is not what was sealed: its digest differs.")


def _fill(descriptor: int, piece: memoryview, path: Path) -> None:
    while piece:
        count = os.readv(descriptor, [piece])
        if not count:
            raise StoreError(f"{path} ended while it was being read.")
        piece = piece[count:]


# --- parts of tensors, in the files of several ranks


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """A part of a tensor as one rank has written it."""

    seal: Seal
    name: str
    """Name in the file, which another tensor of the same memory may have given."""
    plan: FilePlan
    start: int
    """Where its bytes begin in the file."""
    form: TensorForm
    offset: tuple[int, ...]


def _read_parts(
    path: Path, seals: Sequence[Seal], device: torch.device | str | None, select: Select
) -> dict[str, Tensor]:
    stored: dict[str, list[_StoredPart]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for seal in seals:
        for name, whole, part in _stored_parts(path, seal):
            if shapes.setdefault(name, whole) != whole:
                raise StoreError(f"{path} has seals that contradict each other about {name}.")
            stored.setdefault(name, []).append(part)
    tensors: dict[str, Tensor] = {}
    for name, parts in stored.items():
        wanted = select(name, shapes[name])
        if wanted is not None:
            read = _read_part(path, name, wanted, parts)
            tensors[name] = read if device is None else read.to(device)
    return tensors


def _stored_parts(path: Path, seal: Seal) -> Iterator[tuple[str, tuple[int, ...], _StoredPart]]:
    """Yield name, whole shape and place of everything that one seal covers."""
    plans, forms = _planned(path, seal)
    _check_names(path, seal, plans)
    places: dict[str, tuple[FilePlan, int]] = {}
    for plan in plans:
        _check_size(path, seal, plan)
        for held, start in zip(plan.names, plan.starts, strict=True):
            places[held] = (plan, start)
    for name, sealed in seal.tensors.items():
        shape = tuple(sealed.shape)
        part = seal.parts.get(name, SealedPart(whole=shape, offset=(0,) * len(shape)))
        if not _fits(part, shape):
            raise StoreError(f"{path} has a seal that contradicts itself: {name} is no such part.")
        key = sealed.same_as or name
        found = _StoredPart(seal, key, *places[key], forms[key], tuple(part.offset))
        yield name, tuple(part.whole), found


def _fits(part: SealedPart, shape: tuple[int, ...]) -> bool:
    if not len(part.whole) == len(part.offset) == len(shape):
        return False
    ends = [at + size for at, size in zip(part.offset, shape, strict=True)]
    return all(end <= most for end, most in zip(ends, part.whole, strict=True))


def _read_part(path: Path, name: str, wanted: TensorPart, parts: Sequence[_StoredPart]) -> Tensor:
    """Put the wanted part together from those that are stored."""
    held = sum(math.prod(part.form.shape) for part in parts)
    if held < wanted.elements:
        raise StoreError(
            f"{path} is not whole: {held} of {wanted.elements} elements of {name} are stored."
        )
    tensor = torch.empty(wanted.size, dtype=parts[0].form.dtype)
    filled = 0
    for number, item in _overlaps(name, wanted, parts):
        source = _read_stored(path / parts[number].plan.name, parts[number])
        target = tensor
        for axis, length in enumerate(item.lengths):
            source = source.narrow(axis, item.storage_offsets[axis], length)
            target = target.narrow(axis, item.dest_offsets[axis], length)
        target.copy_(source)
        filled += math.prod(item.lengths)
    if filled != wanted.elements:
        raise StoreError(
            f"{path} is not whole: {filled} of {wanted.elements} elements of {name} are stored."
        )
    return tensor


def _overlaps(name: str, wanted: TensorPart, parts: Sequence[_StoredPart]) -> list[tuple[int, Any]]:
    """Number of each stored part that is needed, and what of it goes where."""
    if not wanted.elements:
        return []
    # imported late: it takes seconds, and a checkpoint of one process needs none of it
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(offset: tuple[int, ...], size: tuple[int, ...]) -> Any:
        return metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size))

    described = metadata.TensorStorageMetadata(
        properties=metadata.TensorProperties(dtype=parts[0].form.dtype),
        size=torch.Size(wanted.whole),
        chunks=[chunk(part.offset, part.form.shape) for part in parts],
    )
    items = create_read_items_for_chunk_list(name, described, [chunk(wanted.offset, wanted.size)])
    return [(item.storage_index.index or 0, item) for item in items]


def _read_stored(path: Path, part: _StoredPart) -> Tensor:
    """Read one stored part, proven by its own digest."""
    tensor, view = empty_tensor(part.form)
    descriptor, _ = open_plain(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if file.read(len(part.plan.header)) != part.plan.header:
            raise StoreError(f"{path} is not what was sealed: its header differs.")
        file.seek(part.start)
        digest = xxhash.xxh3_128()
        for at in range(0, len(view), PIECE):
            piece = view[at : at + PIECE]
            _fill(file.fileno(), piece, path)
            digest.update(piece)
    if digest.hexdigest() != part.seal.tensors[part.name].digest:
        raise StoreError(f"{path} is not what was sealed: {part.name} differs.")
    return tensor

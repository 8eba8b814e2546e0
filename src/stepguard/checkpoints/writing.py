"""Writes the files of a checkpoint: one pass over every tensor for finite test, digests and disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.layout import FilePlan, Form, form_of, planned
from stepguard.checkpoints.pieces import PIECE, nonfinite, pieces
from stepguard.checkpoints.seal import LARGEST, SealedFile, SealedTensor, digest_of, open_plain
from stepguard.state.atomic import Disk, NewFile

_DIRECT = getattr(os, "O_DIRECT", 0)
PACE = 1 << 26
"""Bytes between syncs of a large file: the disk works along, and never has a gigabyte to swallow at
the end.
"""


@dataclass(slots=True)
class Written:
    """What the seal will say about the files."""

    files: dict[str, SealedFile] = field(default_factory=dict)
    tensors: dict[str, SealedTensor] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], may_be_nonfinite: Collection[str], disk: Disk
) -> Written:
    """Every tensor, each memory once; StoreError as soon as one holds NaN or Inf without
    permission.
    """
    written = Written()
    first_names = _first_names(tensors)
    forms = {name: form_of(name, tensors[name]) for name in tensors if first_names[name] == name}
    for plan in planned(forms):
        with disk.new_file(folder / plan.name) as file:
            _write_file(file, plan, forms, tensors, may_be_nonfinite, written)
            file.sync()
    for name, first in first_names.items():
        if first != name:
            same = written.tensors[first]
            written.tensors[name] = SealedTensor(
                file=same.file,
                dtype=same.dtype,
                shape=same.shape,
                digest=same.digest,
                same_as=first,
            )
    return written


def write_json(path: Path, content: bytes, disk: Disk) -> SealedFile:
    """A small file, durable."""
    if len(content) > LARGEST:
        raise StoreError(
            f"{path.name} would have {len(content)} bytes; more than {LARGEST} are not read back."
        )
    with disk.new_file(path) as file:
        file.write(content)
        file.sync()
    return SealedFile(size=len(content), digest=digest_of(content))


def read_back(path: Path, expected: SealedFile) -> None:
    """Ask the disk, not the memory of the system, for what was written. A disk that keeps wrong
    bytes is found here.
    """
    fd, size = open_plain(path)
    try:
        _forget_pages(fd)
        try:
            digest = _digest(path, size, _DIRECT)
        except OSError:
            digest = _digest(path, size, 0)
        _forget_pages(fd)
    finally:
        os.close(fd)
    if size != expected.size or digest != expected.digest:
        raise StoreError(
            f"{path.name} reads back different from what was written; the disk cannot be trusted."
        )


def _digest(path: Path, size: int, flags: int) -> str:
    """Of a file that is read past the system's memory, where the filesystem can do that: half the
    processor time.
    """
    digest = xxhash.xxh3_128()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        with mmap.mmap(-1, PIECE) as aligned, memoryview(aligned) as view:
            while size > 0 and (count := os.readv(fd, [view])) > 0:
                size -= count
                with view[:count] as piece:
                    digest.update(piece)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _forget_pages(fd: int) -> None:
    """Before reading back, so that the disk is asked; afterwards, so that the user's data stays in
    memory instead.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For every name the first name of the same memory seen the same way."""
    seen: dict[object, str] = {}
    return {
        name: seen.setdefault(_memory(name, tensor), name)
        for name, tensor in sorted(tensors.items())
    }


def _memory(name: str, tensor: Tensor) -> object:
    if not isinstance(tensor, Tensor):
        raise StoreError(
            f"{name} is a {type(tensor).__name__}, not a tensor; plain values belong into the "
            f"facts."
        )
    strided = str(tensor.layout) == "torch.strided" and tensor.device.type != "meta"
    if not strided or not tensor.numel():
        return name
    look = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), *look


def _write_file(
    file: NewFile,
    plan: FilePlan,
    forms: Mapping[str, Form],
    tensors: Mapping[str, Tensor],
    may_be_nonfinite: Collection[str],
    written: Written,
) -> None:
    whole = xxhash.xxh3_128(plan.header)
    file.write(plan.header)
    for name in plan.names:
        form, bad, digest = forms[name], 0, xxhash.xxh3_128()
        for piece in pieces(tensors[name]):
            bad += nonfinite(piece, form.dtype)
            if bad and name not in may_be_nonfinite:
                raise StoreError(
                    f"not sealed: {name} holds NaN or Inf; a checkpoint must be finite to be of "
                    f"use."
                )
            digest.update(piece)
            whole.update(piece)
            file.write(piece)
            if file.size - file.synced >= PACE:
                file.sync()
        if bad:
            written.nonfinite.append(name)
        written.tensors[name] = SealedTensor(
            file=plan.name, dtype=form.dtype_name, shape=form.shape, digest=digest.hexdigest()
        )
    written.files[plan.name] = SealedFile(size=file.size, digest=whole.hexdigest())

"""Write the files of a checkpoint: one pass over every tensor for finite test, digests and disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.file_plan import FilePlan, TensorForm, form_of, plan_files
from stepguard.checkpoints.pieces import PIECE, nonfinite, pieces
from stepguard.checkpoints.seal import LARGEST, SealedFile, SealedTensor, digest_of, open_plain
from stepguard.state.atomic import Disk, NewFile

_DIRECT = getattr(os, "O_DIRECT", 0)
PACE = 1 << 26
"""Bytes between syncs of a large file, so that the last sync does not wait for gigabytes."""


@dataclass(slots=True)
class WrittenFiles:
    """What the seal will say about the files."""

    files: dict[str, SealedFile] = field(default_factory=dict)
    tensors: dict[str, SealedTensor] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)
    ranks: int = 0
    """How many ranks have written them, each with a seal of its own; 0 for one process."""


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    may_be_nonfinite: Collection[str],
    disk: Disk,
    stem: str = "tensors",
) -> WrittenFiles:
    """Write every tensor, shared memory once; StoreError for NaN or Inf without permission."""
    written = WrittenFiles()
    first_names = _first_names(tensors)
    forms = {name: form_of(name, tensors[name]) for name in tensors if first_names[name] == name}
    for plan in plan_files(forms, stem):
        with disk.new_file(folder / plan.name) as file:
            _write_file(file, plan, forms, tensors, may_be_nonfinite, written)
            file.sync()
    for name, first in first_names.items():
        if first != name:
            written.tensors[name] = replace(written.tensors[first], same_as=first)
    return written


def write_json(path: Path, content: bytes, disk: Disk) -> SealedFile:
    """Write a small file, durably."""
    if len(content) > LARGEST:
        raise StoreError(
            f"{path.name} would have {len(content)} bytes; more than {LARGEST} are not read back."
        )
    with disk.new_file(path) as file:
        file.write(content)
        file.sync()
    return SealedFile(size=len(content), digest=digest_of(content))


def read_back(path: Path, expected: SealedFile) -> None:
    """Read a file from the disk, not from the page cache, and compare: finds disks that lie."""
    fd, size = open_plain(path)
    try:
        _drop_from_page_cache(fd)
        try:
            digest = _digest(path, size, _DIRECT)
        except OSError:
            # the filesystem has no O_DIRECT (tmpfs, some network ones)
            digest = _digest(path, size, 0)
        # again, so that the training data stays in memory instead of the checkpoint
        _drop_from_page_cache(fd)
    finally:
        os.close(fd)
    if size != expected.size or digest != expected.digest:
        raise StoreError(
            f"{path.name} reads back different from what was written; the disk cannot be trusted."
        )


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest that a seal has of a tensor."""
    digest = xxhash.xxh3_128()
    for piece in pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


def _digest(path: Path, size: int, flags: int) -> str:
    """Return the digest of a file; O_DIRECT in `flags` reads past the page cache."""
    digest = xxhash.xxh3_128()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        # O_DIRECT wants a buffer that begins at a page, as an anonymous mmap does
        with mmap.mmap(-1, PIECE) as aligned, memoryview(aligned) as view:
            while size > 0 and (count := os.readv(fd, [view])) > 0:
                size -= count
                with view[:count] as piece:
                    digest.update(piece)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _drop_from_page_cache(fd: int) -> None:
    # macOS has no posix_fadvise
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map every name to the first name of the same view of the same memory (tied weights)."""
    seen: dict[object, str] = {}
    first_names = {}
    for name, tensor in sorted(tensors.items()):
        first_names[name] = seen.setdefault(_memory(name, tensor), name)
    return first_names


def _memory(name: str, tensor: Tensor) -> object:
    """Return a key that is the same for two tensors only if they have the same values for ever."""
    if not isinstance(tensor, Tensor):
        raise StoreError(
            f"{name} is a {type(tensor).__name__}, not a tensor; plain values belong into the "
            f"facts."
        )
    strided = str(tensor.layout) == "torch.strided" and tensor.device.type != "meta"
    # empty tensors may all have the address 0, others have no address at all
    if not strided or not tensor.numel():
        return name
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


def _write_file(
    file: NewFile,
    plan: FilePlan,
    forms: Mapping[str, TensorForm],
    tensors: Mapping[str, Tensor],
    may_be_nonfinite: Collection[str],
    written: WrittenFiles,
) -> None:
    whole = xxhash.xxh3_128(plan.header)
    file.write(plan.header)
    for name in plan.names:
        form = forms[name]
        bad = 0
        digest = xxhash.xxh3_128()
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

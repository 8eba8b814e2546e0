"""The tensor files of a checkpoint: plain safetensors, written in one pass, read piece by piece.

They are written and read here and not by the library of that name, which maps
whole files into memory: a disk that fails under a mapping kills the process, and a tensor would be
copied before it is written. The seal says where each tensor begins, so a reader parses no header.
Where several ranks have written, each file holds parts of tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.seal import (
    FACTS,
    LARGEST,
    UNKNOWN,
    Seal,
    SealedFile,
    SealedPart,
    SealedTensor,
    digest_of,
    open_plain,
)
from stepguard.report import phrases
from stepguard.state.files import Disk
from stepguard.tensors.names import TensorPart, whole_part
from stepguard.tensors.values import dtype_name

FILE_BYTES = 1 << 31
FILE_TENSORS = 50_000
"""A file holds this much at most, or one larger tensor; the format allows a header of 100 MB."""
METADATA = "__metadata__"
CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
REAL_PART = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""The format has no complex numbers: they are stored as pairs, and the seal has their type."""
BY_NAME = {
    dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the elements in the file."""
    return REAL_PART.get(tensor.dtype, tensor.dtype)


# --- Tensors as a stream of flat byte pieces, and the exact finite test on them.


PIECE = 1 << 19
"""Bytes of a piece: fits the second-level cache, and is worth releasing the interpreter lock."""

_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_EXPONENTS: dict[torch.dtype, tuple[int, int]] = {
    torch.float16: (0x7FFF, 0x7C00),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float32: (0x7FFF_FFFF, 0x7F80_0000),
    torch.float64: (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float8_e5m2: (0x7F, 0x7C),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
"""Mask of all bits but the sign, and the first pattern of a number that is not finite."""
_ONE_NAN = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
"""Formats without infinities whose only NaN is minus zero."""


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order; strided ones are copied piece by piece."""
    for flat in _flat_pieces(tensor.detach()):
        # conj() only sets a flag, and so does .imag of a conjugate: the memory holds other values
        host = flat.cpu().resolve_conj().resolve_neg()
        if host.numel():
            yield host.view(torch.uint8).numpy().data


def _flat_pieces(tensor: Tensor) -> Iterator[Tensor]:
    most = max(PIECE // tensor.element_size(), 1)
    if tensor.numel() <= most:
        yield tensor.contiguous().view(-1)
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), most)
    else:
        rows = max(most // tensor[0].numel(), 1)
        for part in torch.split(tensor, rows):
            # a single row is split along its own dimensions
            yield from _flat_pieces(part if rows > 1 else part[0])


def nonfinite(piece: memoryview, dtype: torch.dtype) -> int:
    """Count the elements that are NaN or infinite, by their bits: exact for every float format."""
    dtype = REAL_PART.get(dtype, dtype)
    if dtype not in _EXPONENTS and dtype not in _ONE_NAN:
        return 0
    bits = np.frombuffer(piece, dtype=_INTEGERS[dtype.itemsize])
    if dtype in _ONE_NAN:
        return int(np.count_nonzero(bits == _ONE_NAN[dtype]))
    mask, first = _EXPONENTS[dtype]
    magnitude = np.bitwise_and(bits, bits.dtype.type(mask))
    # max() is faster than a comparison, and nearly always enough
    if magnitude.max() < first:
        return 0
    return int(np.count_nonzero(magnitude >= first))


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest that a seal has of a tensor."""
    digest = xxhash.xxh3_128()
    for piece in pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


# --- Write the files of a checkpoint: one pass over every tensor for finite test, digests and
# disk.


_DIRECT = getattr(os, "O_DIRECT", 0)
PACE = 1 << 26
"""Bytes between syncs of a large file, so that the last sync does not wait for gigabytes."""


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    may_be_nonfinite: Collection[str],
    disk: Disk,
    stem: str = "tensors",
) -> Seal:
    """Write every tensor, shared memory once; StoreError for NaN or Inf without permission.

    Returns a seal over the files, which says nothing yet about the run.
    """
    for name, tensor in tensors.items():
        _refuse_odd(name, tensor)

    def order(name: str) -> tuple[int, str]:
        # wide elements first, so that every tensor is aligned where a reader maps the file
        return -stored_dtype(tensors[name]).itemsize, name

    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    """Further names of the same view of the same memory (tied weights) -> the first name of it."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors, key=order):
        tensor = tensors[name]
        known = first.setdefault(_memory(name, tensor), name)
        if known != name:
            tied[name] = known
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if groups[-1] and (size + nbytes > FILE_BYTES or len(groups[-1]) >= FILE_TENSORS):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    files: dict[str, SealedFile] = {}
    sealed: dict[str, SealedTensor] = {}
    bad: list[str] = []
    for number, names in enumerate(groups):
        path = folder / f"{stem}-{number:05d}.safetensors"
        few = {name: tensors[name] for name in names}
        files[path.name] = _write_file(path, few, may_be_nonfinite, disk, sealed, bad)
    for name, known in tied.items():
        sealed[name] = sealed[known]
    for name, file in files.items():
        read_back(folder / name, file)
    return Seal(
        step=0,
        health=UNKNOWN,
        files=files,
        tensors=sealed,
        serial=0,
        nonfinite=tuple(bad),
    )


def _write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    may_be_nonfinite: Collection[str],
    disk: Disk,
    sealed: dict[str, SealedTensor],
    bad: list[str],
) -> SealedFile:
    """Write one safetensors file; adds to what is sealed, and to the names that are not finite."""
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.numel() * tensor.element_size()
        pair = [2] if tensor.is_complex() else []
        entries[name] = {
            # rare 8-bit floats (e8m0fnu, fnuz) are stored as U8
            "dtype": CODES.get(stored_dtype(tensor), "U8"),
            "shape": [*tensor.shape, *pair],
            "data_offsets": [begin, end],
        }
    # the format wants the data to begin at a multiple of eight bytes, and allows blanks for that
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    with disk.new_file(path) as file:
        whole = xxhash.xxh3_128(header)
        file.write(header)
        for name, tensor in tensors.items():
            start = file.size
            is_bad = False
            digest = xxhash.xxh3_128()
            for piece in pieces(tensor):
                if nonfinite(piece, tensor.dtype):
                    is_bad = True
                    if name not in may_be_nonfinite:
                        raise StoreError(
                            f"not sealed: {name} holds NaN or Inf; a checkpoint must be "
                            "finite to be useful."
                        )
                digest.update(piece)
                whole.update(piece)
                file.write(piece)
                if file.size - file.synced >= PACE:
                    file.sync()
            if is_bad:
                bad.append(name)
            sealed[name] = SealedTensor(
                file=path.name,
                start=start,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                digest=digest.hexdigest(),
            )
        file.sync()
        return SealedFile(size=file.size, digest=whole.hexdigest(), header=digest_of(header))


def _refuse_odd(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise StoreError(
            f"{name} is a {type(tensor).__name__}, not a tensor; put plain values into the facts."
        )
    odd = ""
    if name == METADATA:
        odd = "has a name that safetensors reserves; rename it"
    elif tensor.layout is not torch.strided:
        odd = f"has the layout {tensor.layout}; pass tensor.to_dense()"
    elif tensor.device.type == "meta" or tensor.is_quantized:
        odd = "has no plain memory (meta or quantized); pass its real values"
    elif stored_dtype(tensor) not in CODES and tensor.element_size() != 1:
        odd = (
            f"has the dtype {tensor.dtype}, which safetensors cannot hold; pass a view of "
            "it as bytes"
        )
    if odd:
        raise StoreError(f"{name} cannot be kept in a checkpoint: it {odd}.")


def _memory(name: str, tensor: Tensor) -> object:
    """Return a key that is the same for two tensors only if they have the same values for ever."""
    # empty tensors may all have the address 0
    if not tensor.numel():
        return name
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


def write_json(path: Path, content: bytes, disk: Disk) -> SealedFile:
    """Write a small file, durably."""
    if len(content) > LARGEST:
        raise StoreError(
            f"{path.name} would have {len(content)} bytes; at most {LARGEST} can be read back."
        )
    with disk.new_file(path) as file:
        file.write(content)
        file.sync()
    return SealedFile(size=len(content), digest=digest_of(content))


def read_back(path: Path, expected: SealedFile) -> None:
    """Read a file from the disk, not from the page cache, and compare: finds disks that lie."""
    fd, size = open_plain(path)
    # macOS has no posix_fadvise
    advise = getattr(os, "posix_fadvise", lambda *_: None)
    dont_need = getattr(os, "POSIX_FADV_DONTNEED", 0)
    try:
        advise(fd, 0, 0, dont_need)
        try:
            digest = _digest(path, size, _DIRECT)
        except OSError:
            # the filesystem has no O_DIRECT (tmpfs, some network ones)
            digest = _digest(path, size, 0)
        # again, so that the training data stays in memory instead of the checkpoint
        advise(fd, 0, 0, dont_need)
    finally:
        os.close(fd)
    if size != expected.size or digest != expected.digest:
        raise StoreError(
            f"{path.name} reads back different from what was written; the disk cannot be trusted."
        )


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


# --- Read the tensors of a checkpoint, each proven against the seal, whole or the part that is
# wanted.


Select = Callable[[str, tuple[int, ...]], TensorPart | None]
"""Takes the name and the whole shape of a tensor; returns the part to read, None for nothing."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, or a part of one, as it lies in a file."""

    path: Path
    sealed: SealedTensor
    whole: tuple[int, ...]
    offset: tuple[int, ...]

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.sealed.shape, dtype=BY_NAME[self.sealed.dtype])
        view = memoryview(b"")
        if tensor.numel():
            view = tensor.view(-1).view(torch.uint8).numpy().data
        if _read_into(view, self.path, self.sealed.start) != self.sealed.digest:
            raise StoreError(f"{self.path} is not what was sealed: {name} differs.")
        return tensor


def read_tensors(
    path: Path, seals: Sequence[Seal], select: Select | None = None
) -> dict[str, Tensor]:
    """Read every tensor, or the parts that `select` asks for."""
    stored: dict[str, list[_Stored]] = {}
    needed = 0
    for seal in seals:
        _check_files(path, seal)
        needed += sum(file.size for file in seal.files.values())
        for name, sealed in seal.tensors.items():
            stored.setdefault(name, []).append(_stored(path, name, seal, sealed))
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if select is None and needed > installed:
        raise StoreError(
            f"{path} needs {phrases.size(needed)} of memory; this machine has "
            f"{phrases.size(installed)}."
        )
    tensors: dict[str, Tensor] = {}
    read: dict[SealedTensor, Tensor] = {}
    """Tied tensors have several names and lie in the file once."""
    for name, parts in stored.items():
        first = parts[0]
        if any(part.whole != first.whole for part in parts):
            raise StoreError(f"{path} has seals that contradict each other about {name}.")
        wanted: TensorPart | None = whole_part(first.whole)
        if select is not None:
            wanted = select(name, first.whole)
        if wanted is None:
            continue
        if len(parts) > 1 or wanted.size != first.sealed.shape:
            tensors[name] = _assembled(path, name, wanted, parts)
            continue
        if first.sealed not in read:
            read[first.sealed] = first.read(name)
        tensors[name] = read[first.sealed]
    return tensors


def _check_files(path: Path, seal: Seal) -> None:
    """Refuse files of another size or with another header than was sealed."""
    starts: dict[str, int] = {}
    for sealed in seal.tensors.values():
        starts[sealed.file] = min(sealed.start, starts.get(sealed.file, sealed.start))
    for name in sorted(seal.files.keys() - {FACTS}):
        file = seal.files[name]
        descriptor, size = open_plain(path / name)
        os.close(descriptor)
        if size != file.size:
            raise StoreError(
                f"{path} is incomplete: {name} has {size} bytes, {file.size} were sealed."
            )
        header = bytearray(min(starts.get(name, size), LARGEST))
        if _read_into(memoryview(header), path / name, 0) != file.header:
            raise StoreError(f"{path / name} is not what was sealed: its header differs.")


def _stored(path: Path, name: str, seal: Seal, sealed: SealedTensor) -> _Stored:
    """Where a tensor lies. Refuses what can be known to be wrong before memory is taken for it."""
    if sealed.dtype not in BY_NAME:
        raise StoreError(
            f"{path} cannot be read: {sealed.dtype[:50]!r} is not a dtype of torch "
            f"{torch.__version__}."
        )
    shape = sealed.shape
    part = seal.parts.get(name, SealedPart(whole=shape, offset=(0,) * len(shape)))
    fits = sealed.file in seal.files and len(part.whole) == len(part.offset) == len(shape)
    if fits:
        places = zip(part.offset, shape, part.whole, strict=True)
        end = sealed.start + math.prod(shape) * BY_NAME[sealed.dtype].itemsize
        fits = end <= seal.files[sealed.file].size
        fits = fits and all(at + size <= most for at, size, most in places)
    if not fits:
        raise StoreError(
            f"{path} has a seal that contradicts itself: no file holds {name} as described."
        )
    return _Stored(path / sealed.file, sealed, part.whole, part.offset)


def _read_into(view: memoryview, path: Path, start: int) -> str:
    """Fill the memory from a place in the file on; returns the digest of what was read."""
    digest = xxhash.xxh3_128()
    descriptor, _ = open_plain(path)
    try:
        while view:
            count = os.preadv(descriptor, [view[:PIECE]], start)
            if not count:
                raise StoreError(f"{path} ended while it was being read.")
            digest.update(view[:count])
            view = view[count:]
            start += count
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _assembled(path: Path, name: str, wanted: TensorPart, parts: Sequence[_Stored]) -> Tensor:
    """Put the wanted part together from those that are stored."""
    held = sum(math.prod(part.sealed.shape) for part in parts)
    filled = 0
    tensor = torch.empty(0)
    # else not even memory is taken for it
    if held >= wanted.elements:
        tensor = torch.empty(wanted.size, dtype=BY_NAME[parts[0].sealed.dtype])
        for part in parts:
            filled += _copy_overlap(tensor, wanted, part, name)
    if filled != wanted.elements:
        raise StoreError(
            f"{path} is incomplete: {filled or held} of {wanted.elements} elements of {name} are "
            f"stored."
        )
    return tensor


def _copy_overlap(target: Tensor, wanted: TensorPart, part: _Stored, name: str) -> int:
    """Copy what the wanted and the stored part have in common; returns how many elements."""
    boxes: list[tuple[int, int]] = []
    for axis, size in enumerate(part.sealed.shape):
        begin = max(wanted.offset[axis], part.offset[axis])
        end = min(wanted.offset[axis] + wanted.size[axis], part.offset[axis] + size)
        if end <= begin:
            return 0
        boxes.append((begin, end - begin))
    source = part.read(name)
    for axis, (begin, length) in enumerate(boxes):
        source = source.narrow(axis, begin - part.offset[axis], length)
        target = target.narrow(axis, begin - wanted.offset[axis], length)
    target.copy_(source)
    return target.numel()

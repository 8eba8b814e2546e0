"""Read the tensors of a checkpoint, each proven against the seal, whole or the part that is wanted.

Where several ranks have written, each file holds parts of tensors. Which of them make up the part
that a rank of another mesh wants is worked out by torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    SCHEMA,
    Health,
    Seal,
    SealedFile,
    SealedPart,
    SealedTensor,
    digest_of,
    open_plain,
    parse_seal,
    rank_seal_name,
    read_small,
    seal_bytes,
)
from stepguard.state.files import Disk, NewFile, write_file
from stepguard.tensors.names import TensorPart, whole_part
from stepguard.tensors.values import dtype_name

# --- Plan how tensors lie in safetensors files, before the first byte is written.


FILE_BYTES = 1 << 31
FILE_TENSORS = 50_000
"""A file holds this much at most, or one larger tensor; the format allows a header of 100 MB."""
_METADATA = "__metadata__"
_CODES = {
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
_BY_NAME = {
    dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Type and shape of a tensor, and how it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_code(self) -> str:
        """Return the format's dtype; rare 8-bit floats (e8m0fnu, fnuz) are stored as U8."""
        return _CODES.get(REAL_PART.get(self.dtype, self.dtype), "U8")

    @property
    def stored_shape(self) -> list[int]:
        if self.dtype in REAL_PART:
            return [*self.shape, 2]
        return list(self.shape)

    @property
    def stored_width(self) -> int:
        return REAL_PART.get(self.dtype, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One safetensors file: its header and the order of what follows."""

    name: str
    header: bytes
    names: tuple[str, ...]
    starts: tuple[int, ...]
    """Where in the file the bytes of each begin."""
    size: int


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """Return the form of a tensor; StoreError for one that cannot be stored."""
    form = TensorForm(tensor.dtype, tuple(tensor.shape))
    odd = None
    if name == _METADATA:
        odd = "has the one name that safetensors keeps for itself; give it another"
    elif tensor.layout is not torch.strided:
        odd = f"has the layout {tensor.layout}; hand over tensor.to_dense()"
    elif tensor.device.type == "meta" or tensor.is_quantized:
        odd = "has no plain memory (meta or quantized); hand over its real values"
    elif form.stored_code == "U8" and form.dtype.itemsize != 1:
        odd = (
            f"has the dtype {form.dtype}, which safetensors cannot hold; hand over a view of it "
            f"as bytes"
        )
    if odd is not None:
        raise StoreError(f"{name} cannot be kept in a checkpoint: it {odd}.")
    return form


def form_from_seal(dtype: str, shape: tuple[int, ...]) -> TensorForm:
    """Return the form that a seal names; ValueError for a type that this torch does not have."""
    if dtype not in _BY_NAME:
        raise ValueError(f"{dtype[:50]!r} is not a dtype of torch {torch.__version__}")
    return TensorForm(_BY_NAME[dtype], shape)


def plan_files(forms: Mapping[str, TensorForm], stem: str = "tensors") -> list[FilePlan]:
    """Plan the files of a checkpoint, or of one rank's part of it."""
    plans = []
    for index, group in enumerate(_groups(stored_order(forms, forms), forms)):
        plans.append(plan_file(f"{stem}-{index:05d}.safetensors", group, forms))
    return plans


def stored_order(names: Iterable[str], forms: Mapping[str, TensorForm]) -> list[str]:
    """Return the order of tensors in a file."""
    # wide elements first, so that every tensor is aligned where a reader maps the file
    return sorted(names, key=lambda name: (-forms[name].stored_width, name))


def plan_file(name: str, names: Iterable[str], forms: Mapping[str, TensorForm]) -> FilePlan:
    """Plan one file. The header follows from names and forms, so a reader need not parse it."""
    ordered = tuple(names)
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    begins: list[int] = []
    for tensor in ordered:
        form = forms[tensor]
        begin = end
        begins.append(begin)
        end += form.nbytes
        entries[tensor] = {
            "dtype": form.stored_code,
            "shape": form.stored_shape,
            "data_offsets": [begin, end],
        }
    # the format wants the data to begin at a multiple of eight bytes, and allows blanks for that
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple(len(header) + begin for begin in begins)
    return FilePlan(name, header, ordered, starts, len(header) + end)


def _groups(order: list[str], forms: Mapping[str, TensorForm]) -> Iterator[list[str]]:
    """Divide the tensors into files; a checkpoint without tensors has one empty file."""
    group: list[str] = []
    size = 0
    for name in order:
        if group and (size + forms[name].nbytes > FILE_BYTES or len(group) >= FILE_TENSORS):
            yield group
            group = []
            size = 0
        group.append(name)
        size += forms[name].nbytes
    if group or not order:
        yield group


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
"""Mask of all bits but the sign, and the pattern from which on a number is not finite."""
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


def empty_tensor(form: TensorForm) -> tuple[Tensor, memoryview]:
    """Return a new tensor and its bytes, to be read into."""
    tensor = torch.empty(form.shape, dtype=form.dtype)
    if not tensor.numel():
        return tensor, memoryview(bytearray())
    return tensor, tensor.view(-1).view(torch.uint8).numpy().data


# --- Read the tensors of a checkpoint, each proven against the seal, whole or the part that is
# wanted.


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


# --- Write the files of a checkpoint: one pass over every tensor for finite test, digests and
# disk.


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


# --- What one rank writes of a checkpoint that all ranks write together, with a seal of its own.


UNKNOWN = Health(loss=None, level=None, steps_watched=0, incidents=0, good=False)
"""One rank cannot say whether the state of all is good."""


def write_rank(
    folder: Path,
    rank: int,
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, TensorPart],
    may_be_nonfinite: Collection[str],
    disk: Disk,
    *,
    reads_back: bool,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """Write the tensors of one rank, then their seal; returns the digest of the seal.

    A part that another rank writes, and one without an element, is left out. `facts`: what this
    rank adds to those of a checkpoint that another one wrote.
    """
    mine: dict[str, Tensor] = {}
    places: dict[str, SealedPart] = {}
    for name, tensor in tensors.items():
        part = parts.get(name)
        if part is None:
            mine[name] = tensor
        elif part.first and part.elements:
            mine[name] = tensor
            places[name] = SealedPart(whole=part.whole, offset=part.offset)
    written = write_tensors(folder, mine, may_be_nonfinite, disk, stem=f"rank-{rank:05d}")
    if reads_back:
        for name, sealed in written.files.items():
            read_back(folder / name, sealed)
    seal = Seal(
        step=0,
        health=UNKNOWN,
        files=written.files,
        tensors=written.tensors,
        serial=0,
        nonfinite=tuple(written.nonfinite),
        parts=places,
        facts=dict(facts or {}),
        schema=SCHEMA,
    )
    content = seal_bytes(seal)
    if facts is None:
        write_json(folder / rank_seal_name(rank), content, disk)
    else:
        # somebody may be opening the checkpoint already: all of this seal is there, or none
        write_file(folder / rank_seal_name(rank), content, disk)
    disk.sync_folder(folder)
    return digest_of(content)


def gather_ranks(folder: Path, digests: Sequence[str]) -> WrittenFiles:
    """Read the seals of all ranks, which must have these digests, and list all their files."""
    found = WrittenFiles(ranks=len(digests))
    for rank, digest in enumerate(digests):
        name = rank_seal_name(rank)
        content = read_small(folder / name)
        if digest_of(content) != digest:
            raise StoreError(f"{folder / name} is not what rank {rank} has written.")
        found.files[name] = SealedFile(size=len(content), digest=digest)
        found.files.update(parse_seal(content, folder, name).files)
    return found

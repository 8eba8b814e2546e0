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
from stepguard.state.files import Disk, write_file
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
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the stored elements."""
        return REAL_PART.get(self.dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One safetensors file: its header, and where the bytes of each tensor begin, in order."""

    name: str
    header: bytes
    starts: dict[str, int]
    size: int


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """Return the form of a tensor; StoreError for one that cannot be stored."""
    form = TensorForm(tensor.dtype, tuple(tensor.shape))
    odd = ""
    if name == _METADATA:
        odd = "has the one name that safetensors keeps for itself; give it another"
    elif tensor.layout is not torch.strided:
        odd = f"has the layout {tensor.layout}; hand over tensor.to_dense()"
    elif tensor.device.type == "meta" or tensor.is_quantized:
        odd = "has no plain memory (meta or quantized); hand over its real values"
    elif form.stored not in _CODES and form.dtype.itemsize != 1:
        odd = (
            f"has the dtype {form.dtype}, which safetensors cannot hold; hand over a view of it "
            f"as bytes"
        )
    if odd:
        raise StoreError(f"{name} cannot be kept in a checkpoint: it {odd}.")
    return form


def plan_files(forms: Mapping[str, TensorForm], stem: str = "tensors") -> list[FilePlan]:
    """Plan the files of a checkpoint, or of one rank's part of it; there is always one."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in stored_order(forms, forms):
        group = groups[-1]
        if group and (size + forms[name].nbytes > FILE_BYTES or len(group) >= FILE_TENSORS):
            group = []
            groups.append(group)
            size = 0
        group.append(name)
        size += forms[name].nbytes
    plans = []
    for index, names in enumerate(groups):
        plans.append(plan_file(f"{stem}-{index:05d}.safetensors", names, forms))
    return plans


def stored_order(names: Iterable[str], forms: Mapping[str, TensorForm]) -> list[str]:
    """Return the order of tensors in a file."""
    # wide elements first, so that every tensor is aligned where a reader maps the file
    return sorted(names, key=lambda name: (-forms[name].stored.itemsize, name))


def plan_file(name: str, names: Iterable[str], forms: Mapping[str, TensorForm]) -> FilePlan:
    """Plan one file. The header follows from names and forms, so a reader need not parse it."""
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor in names:
        form = forms[tensor]
        begins[tensor] = end
        end += form.nbytes
        entries[tensor] = {
            # rare 8-bit floats (e8m0fnu, fnuz) are stored as U8
            "dtype": _CODES.get(form.stored, "U8"),
            "shape": [*form.shape, 2] if form.dtype in REAL_PART else list(form.shape),
            "data_offsets": [begins[tensor], end],
        }
    # the format wants the data to begin at a multiple of eight bytes, and allows blanks for that
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {tensor: len(header) + begin for tensor, begin in begins.items()}
    return FilePlan(name, header, starts, len(header) + end)


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
    in_parts = select is not None or any(seal.parts for seal in seals)
    tensors: dict[str, Tensor] = {}
    stored: dict[str, list[_StoredPart]] = {}
    for seal in seals:
        plans, forms = _planned(path, seal, check_memory=not in_parts)
        if in_parts:
            _list_parts(path, seal, plans, forms, stored)
            continue
        held: dict[str, Tensor] = {}
        for plan in plans:
            for name, tensor in _read_file(path, plan, plan.starts, seal, forms):
                held[name] = tensor.to(device=device)
        for name, sealed in seal.tensors.items():
            tensors[name] = held[sealed.same_as or name]
    for name, parts in stored.items():
        whole = parts[0].whole
        if any(part.whole != whole for part in parts):
            raise StoreError(f"{path} has seals that contradict each other about {name}.")
        wanted = whole_part(whole) if select is None else select(name, whole)
        if wanted is not None:
            tensors[name] = _read_part(path, name, wanted, parts).to(device=device)
    return tensors


def _planned(
    path: Path, seal: Seal, *, check_memory: bool
) -> tuple[list[FilePlan], dict[str, TensorForm]]:
    """How the tensors of a seal must lie in its files.

    Refuses all that can be known to be wrong before memory is taken for it.
    """
    forms: dict[str, TensorForm] = {}
    names_of: dict[str, list[str]] = {}
    for name, sealed in seal.tensors.items():
        if sealed.same_as is None:
            if sealed.dtype not in _BY_NAME:
                raise StoreError(
                    f"{path} cannot be read: {sealed.dtype[:50]!r} is not a dtype of torch "
                    f"{torch.__version__}."
                )
            forms[name] = TensorForm(_BY_NAME[sealed.dtype], sealed.shape)
            names_of.setdefault(sealed.file, []).append(name)
    plans = []
    for file in sorted(seal.files.keys() - {FACTS}):
        plans.append(plan_file(file, stored_order(names_of.get(file, ()), forms), forms))
    planned = {name for plan in plans for name in plan.starts}
    for name, sealed in seal.tensors.items():
        first = sealed.same_as or name
        if first not in planned or seal.tensors[first] != replace(sealed, same_as=None):
            raise StoreError(
                f"{path} has a seal that contradicts itself: {name} is in no file as it is "
                f"described."
            )
    for plan in plans:
        _check_size(path, plan, seal.files[plan.name].size)
    needed = sum(plan.size for plan in plans)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if check_memory and needed > installed:
        raise StoreError(f"{path} needs {needed} bytes of memory; this machine has {installed}.")
    return plans, forms


def _check_size(path: Path, plan: FilePlan, sealed: int) -> None:
    if plan.size != sealed:
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
    folder: Path,
    plan: FilePlan,
    names: Iterable[str],
    seal: Seal,
    forms: Mapping[str, TensorForm],
) -> Iterator[tuple[str, Tensor]]:
    """Read some tensors of a file, each proven by its own digest."""
    path = folder / plan.name
    descriptor, _ = open_plain(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if file.read(len(plan.header)) != plan.header:
            raise StoreError(f"{path} is not what was sealed: its header differs.")
        for name in names:
            file.seek(plan.starts[name])
            tensor = torch.empty(forms[name].shape, dtype=forms[name].dtype)
            view = memoryview(b"")
            if tensor.numel():
                view = tensor.view(-1).view(torch.uint8).numpy().data
            digest = xxhash.xxh3_128()
            while view:
                count = os.readv(descriptor, [view[:PIECE]])
                if not count:
                    raise StoreError(f"{path} ended while it was being read.")
                digest.update(view[:count])
                view = view[count:]
            if digest.hexdigest() != seal.tensors[name].digest:
                raise StoreError(f"{path} is not what was sealed: {name} differs.")
            yield name, tensor


# --- parts of tensors, in the files of several ranks


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """A part of a tensor as one rank has written it."""

    seal: Seal
    name: str
    """Name in the file, which another tensor of the same memory may have given."""
    plan: FilePlan
    forms: Mapping[str, TensorForm]
    whole: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def form(self) -> TensorForm:
        return self.forms[self.name]


def _list_parts(
    path: Path,
    seal: Seal,
    plans: Sequence[FilePlan],
    forms: Mapping[str, TensorForm],
    stored: dict[str, list[_StoredPart]],
) -> None:
    """Add whole shape and place of everything that one seal covers, by name."""
    plan_of = {name: plan for plan in plans for name in plan.starts}
    for name, sealed in seal.tensors.items():
        shape = tuple(sealed.shape)
        part = seal.parts.get(name, SealedPart(whole=shape, offset=(0,) * len(shape)))
        fits = len(part.whole) == len(part.offset) == len(shape)
        if fits:
            places = zip(part.offset, shape, part.whole, strict=True)
            fits = all(at + size <= most for at, size, most in places)
        if not fits:
            raise StoreError(f"{path} has a seal that contradicts itself: {name} is no such part.")
        key = sealed.same_as or name
        found = _StoredPart(seal, key, plan_of[key], forms, tuple(part.whole), tuple(part.offset))
        stored.setdefault(name, []).append(found)


def _read_part(path: Path, name: str, wanted: TensorPart, parts: Sequence[_StoredPart]) -> Tensor:
    """Put the wanted part together from those that are stored."""

    def check(held: int, whole: bool) -> None:
        if not whole:
            raise StoreError(
                f"{path} is not whole: {held} of {wanted.elements} elements of {name} are stored."
            )

    held = sum(math.prod(part.form.shape) for part in parts)
    check(held, held >= wanted.elements)
    tensor = torch.empty(wanted.size, dtype=parts[0].form.dtype)
    if not wanted.elements:
        return tensor
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
    filled = 0
    items = create_read_items_for_chunk_list(name, described, [chunk(wanted.offset, wanted.size)])
    for item in items:
        part = parts[item.storage_index.index or 0]
        ((_, source),) = _read_file(path, part.plan, [part.name], part.seal, part.forms)
        target = tensor
        for axis, length in enumerate(item.lengths):
            source = source.narrow(axis, item.storage_offsets[axis], length)
            target = target.narrow(axis, item.dest_offsets[axis], length)
        target.copy_(source)
        filled += math.prod(item.lengths)
    check(filled, filled == wanted.elements)
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
    *,
    reads_back: bool,
) -> WrittenFiles:
    """Write every tensor, shared memory once; StoreError for NaN or Inf without permission."""
    written = WrittenFiles()
    first_names: dict[str, str] = {}
    """Every name -> the first name of the same view of the same memory (tied weights)."""
    seen: dict[object, str] = {}
    for name, tensor in sorted(tensors.items()):
        first_names[name] = seen.setdefault(_memory(name, tensor), name)
    forms = {name: form_of(name, tensors[name]) for name in tensors if first_names[name] == name}
    for plan in plan_files(forms, stem):
        with disk.new_file(folder / plan.name) as file:
            whole = xxhash.xxh3_128(plan.header)
            file.write(plan.header)
            for name in plan.starts:
                form = forms[name]
                bad = 0
                digest = xxhash.xxh3_128()
                for piece in pieces(tensors[name]):
                    bad += nonfinite(piece, form.dtype)
                    if bad and name not in may_be_nonfinite:
                        raise StoreError(
                            f"not sealed: {name} holds NaN or Inf; a checkpoint must be finite to "
                            f"be of use."
                        )
                    digest.update(piece)
                    whole.update(piece)
                    file.write(piece)
                    if file.size - file.synced >= PACE:
                        file.sync()
                if bad:
                    written.nonfinite.append(name)
                written.tensors[name] = SealedTensor(
                    file=plan.name,
                    dtype=dtype_name(form.dtype),
                    shape=form.shape,
                    digest=digest.hexdigest(),
                )
            written.files[plan.name] = SealedFile(size=file.size, digest=whole.hexdigest())
            file.sync()
    for name, first in first_names.items():
        if first != name:
            written.tensors[name] = replace(written.tensors[first], same_as=first)
    if reads_back:
        for name, sealed in written.files.items():
            read_back(folder / name, sealed)
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


def _memory(name: str, tensor: Tensor) -> object:
    """Return a key that is the same for two tensors only if they have the same values for ever."""
    if not isinstance(tensor, Tensor):
        raise StoreError(
            f"{name} is a {type(tensor).__name__}, not a tensor; plain values belong into the "
            f"facts."
        )
    strided = tensor.layout is torch.strided and tensor.device.type != "meta"
    # empty tensors may all have the address 0, others have no address at all
    if not strided or not tensor.numel():
        return name
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


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
    stem = f"rank-{rank:05d}"
    written = write_tensors(folder, mine, may_be_nonfinite, disk, stem, reads_back=reads_back)
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

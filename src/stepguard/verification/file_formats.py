"""The table of checkpoint file formats. To add one: write `x_format.py`, extend FORMATS."""

from __future__ import annotations

import json
import math
import pickle
import tarfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard.records.checks import Role
from stepguard.report.phrases import first_few
from stepguard.verification import bounded_file, pickle_machine
from stepguard.verification.bounded_file import (
    Damaged,
    FileSlice,
    NotPickled,
    ProblemList,
    ZipRecord,
    open_file,
)
from stepguard.verification.pickle_format import (
    PICKLE,
    TORCH_LEGACY,
    add_pickle,
    hostile_refused,
    names_reported,
)
from stepguard.verification.pickle_globals import StorageRecord, TensorRecord
from stepguard.verification.pickle_machine import ByteRange, PickleContents, PickleReader
from stepguard.verification.reading import ChecksumRange, FileLayout
from stepguard.verification.scan import (
    TORCH_SHARED_SUFFIXES,
    TORCH_SUFFIXES,
    FileFormat,
    Progress,
    Read,
    judge,
    scan,
)

# --- Files of torch.save since 1.6: a zip with a pickle and one record for each storage.


SIGNATURE = b"PK\x03\x04"
PICKLE_NAME = "data.pkl"
STORAGES = "data/"
SCRIPTED = "constants.pkl"
"""Its presence makes torch.load hand the archive to torch.jit.load."""
RUN_ON_LOAD = b"__setstate__"


def read_zip(
    source: FileSlice, layout: FileLayout, role: Role | None, prefix: str = ""
) -> PickleContents:
    """Fill the layout from the pickle and the records of its storages, each with its CRC."""
    records = bounded_file.zip_records(source)
    reader = _pickle_reader(source, records)
    # storages are written as they lie in memory, in the byte order of the machine
    order = records.get("byteorder")
    if order is not None and source.at(bounded_file.stored(order).start, 16).strip() == b"big":
        raise Damaged(
            "format", "it was saved on a big-endian machine, which is not read; save it again here"
        )
    _add_checksums(source, layout, records)
    if reader.seen.scripted:
        _check_script(source, layout, records)
    with names_reported(layout, reader.seen):
        value = reader.value()
    storages: dict[str, ByteRange] = {}
    # torch names the record of a storage by the key in its persistent id
    for key, record in records.items():
        if key.startswith(STORAGES):
            start = source.start + bounded_file.stored(record).start
            storages[key.removeprefix(STORAGES)] = ByteRange(start, record.size)
    contents = add_pickle(layout, value, storages, role, prefix)
    shown = {tensor.record.storage.key for tensor in contents.tensors
             if isinstance(tensor.record, TensorRecord)}  # fmt: skip
    for key, storage in reader.storages.items():
        size = storage.elements * bounded_file.SIZES[storage.dtype]
        held = storages[key].size if key in storages else 0
        # torch reads each one that the pickle names, whether a tensor needs it or not
        if key not in shown and held != size:
            layout.problems.add(
                "torn", f"storage {key} has {held:,} bytes in the file and {size:,} in the pickle"
            )
    return contents


def _pickle_reader(source: FileSlice, records: dict[str, ZipRecord]) -> PickleReader:
    if PICKLE_NAME not in records:
        raise Damaged(
            "format",
            f"the zip holds no {PICKLE_NAME} but {first_few(sorted(records), 5)}: "
            f"it is not from torch.save",
        )
    record = bounded_file.stored(records[PICKLE_NAME])
    return PickleReader(source.part(record.start, record.size), scripted=SCRIPTED in records)


def _check_script(source: FileSlice, layout: FileLayout, records: dict[str, ZipRecord]) -> None:
    """Report code that loading a TorchScript archive runs: its operators can write files."""
    for key, record in records.items():
        # archives of torch 1.3 and before name the record of their code in here
        if key.lower() == "model.json":
            layout.problems.add(
                "global", f"{record.name} is of a TorchScript archive older than torch 1.4"
            )
        if not key.lower().startswith("code/"):
            continue
        packed = source.exactly(
            record.start, min(record.end - record.start, bounded_file.LONGEST_TEXT)
        )
        text = packed
        if record.packed is not None:
            try:
                text = zlib.decompressobj(-zlib.MAX_WBITS).decompress(
                    packed, bounded_file.LONGEST_TEXT
                )
            except zlib.error as error:
                raise Damaged("torn", f"{record.name!r} cannot be unpacked: {error}") from None
        if len(text) < record.size or RUN_ON_LOAD in text:
            layout.problems.add(
                "global",
                f"{record.name} has a {RUN_ON_LOAD.decode()} in TorchScript, which torch.load "
                "would run, or is too large to be read; nothing was run",
            )


def _add_checksums(source: FileSlice, layout: FileLayout, records: dict[str, ZipRecord]) -> None:
    stored = [record for record in records.values() if record.packed is None]
    # with CRCs switched off, torch writes 0 for every record
    if not any(record.crc for record in stored if record.size):
        layout.problems.add(
            "checksum",
            "was saved without checksums (torch.serialization.set_crc32_options), so flipped bits "
            "cannot be found",
            severity="warning",
        )
        return
    for record in stored:
        start = source.start + record.start
        layout.checksums.append(ChecksumRange(start, record.size, record.name, "crc32", record.crc))


def _content(source: FileSlice) -> Any:
    reader = _pickle_reader(source, bounded_file.zip_records(source))
    with hostile_refused(reader.seen):
        return reader.value()


TORCH_ZIP = FileFormat(
    name="torch zip",
    matches=lambda source, _: source.at(0, len(SIGNATURE)) == SIGNATURE,
    read=read_zip,
    read_content=_content,
    suffixes=TORCH_SUFFIXES,
    shared_suffixes=TORCH_SHARED_SUFFIXES,
    starts=(SIGNATURE,),
)


# --- Safetensors files: the header is checked as strictly as the format demands.


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
    if length > bounded_file.LARGEST_HEADER:
        raise Damaged(
            "limit",
            f"its header of {length:,} bytes is more than the {bounded_file.LARGEST_HEADER:,} "
            "that are read",
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
    if not bounded_file.is_shape(entry.shape) or not bounded_file.is_shape((start, stop)):
        raise unusable
    if min(start, stop, *entry.shape) < 0 or start > stop or not isinstance(entry.dtype, str):
        raise unusable
    return entry


def _add_tensor(layout: FileLayout, entry: HeaderEntry, data: int, context: Role | None) -> None:
    name = entry.name
    bits = bounded_file.SAFETENSORS_BITS.get(entry.dtype)
    dtype = bounded_file.SAFETENSORS.get(entry.dtype, "uint8")
    if bits is None:
        if entry.dtype not in bounded_file.SAFETENSORS:
            detail = f"has elements of type {entry.dtype[:20]!r}, which is not known"
            layout.problems.add("format", detail, tensor=name)
            return
        bits = 8 * bounded_file.SIZES[dtype]
    size = entry.stop - entry.start
    needed = -(-math.prod(entry.shape) * bits // 8)
    if needed != size:
        detail = f"has {size:,} bytes, its shape needs {needed:,}"
        layout.problems.add("malformed", detail, tensor=name)
        return
    role = pickle_machine.of_tensor(context or _role_of_part(name), name, dtype)
    start = data + entry.start
    layout.add_tensor(name, role, dtype, entry.shape, start, start, size)


def _role_of_part(name: str) -> Role | None:
    """Read the role from `optimizer/...`; a name without a slash is the model's or its EMA's."""
    part, slash, _ = name.partition("/")
    role = pickle_machine.named(part)
    if slash or role == "ema":
        return role
    return None


def _is_safetensors(source: FileSlice, suffix: str) -> bool:
    if suffix == SUFFIX:
        return True
    head = source.at(0, 9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= source.size


def _safetensors_format_content(source: FileSlice) -> dict[str, TensorRecord]:
    found = {}
    for entry in _header(source)[0]:
        storage = StorageRecord(entry.name, entry.dtype, math.prod(entry.shape))
        found[entry.name] = TensorRecord(storage, entry.dtype, 0, entry.shape, ())
    return found


SAFETENSORS = FileFormat(
    name="safetensors",
    matches=_is_safetensors,
    read=read_safetensors,
    read_content=_safetensors_format_content,
    suffixes=frozenset({SUFFIX}),
)


# --- The table of checkpoint file formats. To add one: write `x_format.py`, extend FORMATS.


FORMATS: tuple[FileFormat, ...] = (TORCH_ZIP, SAFETENSORS, TORCH_LEGACY, PICKLE)
"""The first one that matches a file reads it."""
SURE_SUFFIXES = frozenset().union(*(entry.suffixes for entry in FORMATS))
SUFFIXES = SURE_SUFFIXES.union(*(entry.shared_suffixes for entry in FORMATS))
STARTS = tuple(start for entry in FORMATS for start in entry.starts)
WEIGHTS = (
    "pytorch_model",
    "adapter_model",
    "optimizer",
    "model",
    "diffusion_pytorch_model",
    "random_states",
)
"""First words of file names that libraries give to checkpoints."""
NOT_READ = {b"GGUF": "GGUF", b"\x89HDF": "HDF5", b"\x93NUM": "NumPy"}
"""First bytes of formats that hold tensors, but are not read here."""


def format_of(source: FileSlice, path: Path) -> FileFormat:
    """Choose the format of a file in the order of torch.load; Damaged if no format matches."""
    suffix = path.suffix.lower()
    if not source.size:
        raise Damaged("torn", "is empty")
    # by content, not by name: people rename `.bin` to `.pt` and back
    for entry in FORMATS:
        if entry.matches(source, suffix):
            if entry is not TORCH_ZIP:
                _refuse_tar(source)
            if entry is SAFETENSORS and not path.name.endswith(".safetensors"):
                _refuse_pickle(source)
            return entry
    _refuse_tar(source)
    raise _not_a_checkpoint(source.at(0, 512))


def _refuse_tar(source: FileSlice) -> None:
    """Raise Damaged for a tar, which torch.load unpacks before it tries anything else."""
    try:
        tarfile.TarInfo.frombuf(source.at(0, tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return
    raise Damaged(
        "format",
        "is a tar (torch.save before 0.1.10); load it with an old torch and save it again",
    )


def _refuse_pickle(source: FileSlice) -> None:
    """Raise Damaged for a safetensors file that torch.load would read as a pickle, by its name."""
    reader = PickleReader(source)
    # they need a stack, or what torch does not give to the first pickle of a file
    if source.at(0, 1) in (pickle.PUT, pickle.PERSID):
        return
    try:
        reader.value()
    except NotPickled:
        if not reader.seen.names:
            return
    except Damaged:
        # more than is read here, but an unpickler would go on
        pass
    raise Damaged(
        "hostile",
        "is a safetensors file and a pickle at once, and is not called .safetensors: torch.load "
        "would run the pickle",
    )


def read_content(path: Path) -> Any:
    """Return what a checkpoint file holds, as plain containers and records; runs nothing of it.

    Raises Damaged for what cannot be read, and for a pickle that was made to run code.
    """
    with open_file(path) as source:
        return format_of(source, path).read_content(source)


def has_checkpoint_suffix(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def is_checkpoint_name(path: Path) -> bool:
    """Tell a checkpoint by its name; with a shared suffix, only if libraries use such a name."""
    suffix = path.suffix.lower()
    if suffix in SURE_SUFFIXES:
        return True
    return suffix in SUFFIXES and path.name.lower().startswith(WEIGHTS)


def is_checkpoint_file(path: Path) -> bool:
    """Tell a checkpoint by its name; of `x.bin`, `x.pkl`, `x.tar` the content decides."""
    if is_checkpoint_name(path):
        return True
    # tutorials of PyTorch call checkpoints `x.tar`, though they are not tars
    if not has_checkpoint_suffix(path) and path.suffix.lower() != ".tar":
        return False
    try:
        with open_file(path) as source:
            return source.at(0, 16).startswith(STARTS) or _is_loaded(source, path)
    except Damaged:
        return False


def _is_loaded(source: FileSlice, path: Path) -> bool:
    """Would torch.load unpack it as a tar, or import a name for it as an older pickle?"""
    try:
        _refuse_tar(source)
    except Damaged:
        return True
    reader = PickleReader(source)
    try:
        reader.value()
    except NotPickled:
        pass
    except Damaged as damage:
        if damage.kind == "limit" or path.suffix.lower() in PICKLE.shared_suffixes:
            return True
    # any text has lines; an extension stands for nothing unless the program has registered one
    return any(
        name.module != "copyreg" and name.module.replace(".", "_").isidentifier()
        for name in reader.seen.names
    )


def _not_a_checkpoint(head: bytes) -> Damaged:
    if not any(head):
        return Damaged("torn", "begins with zeros: its content never reached the disk")
    known = NOT_READ.get(head[:4])
    if known:
        return Damaged("format", f"is a {known} file, which is not read here")
    return Damaged(
        "malformed", f"begins with {head[:8].hex(' ')}, which no known checkpoint format does"
    )


# --- Check one file: parse it by its format, read every value once, judge the values.


def parse(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    """Fill the layout with the reader of the format that the first bytes show."""
    entry = format_of(source, layout.path)
    layout.format = entry.name
    entry.read(source, layout, role)


def check_file(
    path: Path,
    progress: Progress,
    *,
    read: Read | None = None,
    allowed: frozenset[str] = frozenset(),
) -> FileLayout:
    """Check a file; what is wrong with it is in the result, never raised.

    `read` is used instead of the reader of its format; tensors in `allowed` may be non-finite.
    """
    layout = FileLayout(path, "unknown", 0, ProblemList(str(path)))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(count)

    try:
        with open_file(path) as source:
            layout.size = source.size
            try:
                (read or parse)(source, layout, pickle_machine.of_file(path.name))
                layout.complete = True
            except Damaged as damage:
                layout.problems.add_damage(damage)
            # also after damage: what was understood up to there is worth reading
            scan(source, layout, advance)
    except Damaged as damage:
        layout.problems.add_damage(damage)
    judge(layout, allowed)
    # bytes between the tensors were not read; the bar counts the whole file
    progress(max(0, layout.size - done))
    return layout

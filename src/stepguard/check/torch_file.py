"""One checkpoint file of any format: zips of torch.save, older streams, pickles, safetensors."""

from __future__ import annotations

import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stepguard.check.allowed_globals import trust
from stepguard.check.inert_pickle import (
    LEGACY_START,
    LONGEST_TEXT,
    MOST_STACK,
    MOST_VALUES,
    NotPickled,
    PickledObject,
    PickleReader,
    StorageRecord,
    TensorRecord,
)
from stepguard.check.scan import (
    LARGEST_INDEX,
    SAFETENSORS,
    SAFETENSORS_BITS,
    SIZES,
    Checksum,
    Damaged,
    FileLayout,
    FileSlice,
    Progress,
    is_shape,
    judge,
    open_file,
    parse_json,
    role_of_file,
    role_of_part,
    role_of_tensor,
    scan,
    structural,
    table,
)
from stepguard.records.checks import Rate, Role
from stepguard.report.phrases import first_few

# --- The directory of a zip, read as torch reads it, and only where no two readers could differ.

LOCAL = struct.Struct("<4s5H3I2H")
"""The header in front of every entry; its last two numbers are the lengths of name and extra."""
END = struct.Struct("<4s4H2IH")
"""The end record: disks, counts, size and offset of the directory, length of the comment."""
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
ZIP_START = b"PK\x03\x04"
DESCRIPTORS = (0, 12, 16, 20, 24)
"""Bytes that may follow the content of an entry: its sizes once more, as a stream writes them."""
SPECIAL = frozenset({"data.pkl", "constants.pkl", "byteorder", "version"})


class ZipRecord(NamedTuple):
    """One entry of a zip; offsets are those in the slice."""

    name: str
    start: int
    size: int
    crc: int
    packed: int
    """Bytes in the file. An entry that is compressed is never unpacked."""
    is_stored: bool

    def stored(self) -> ZipRecord:
        """Return the entry if its bytes are its content."""
        if not self.is_stored:
            raise Damaged(
                "limit",
                f"{self.name!r} is compressed ({self.packed:,} to {self.size:,} bytes); "
                f"torch.save stores records as they are, so it is not unpacked",
            )
        return self


def zip_records(source: FileSlice) -> dict[str, ZipRecord]:
    """Return the entries by name without the archive's folder, or raise Damaged."""
    count, directory = _directory(source)
    try:
        listed = zipfile.ZipFile(source.reader()).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise Damaged("malformed", f"the zip directory is damaged: {error}") from None
    if len(listed) != count:
        raise Damaged("malformed", f"the zip directory has {len(listed):,} of {count:,} entries")
    found = {}
    folded = set()
    folder = None
    parts = [("the beginning", 0, 0)]
    """Names of what follows each other, and where it begins and ends."""
    for info in sorted(listed, key=lambda info: info.header_offset):
        record = _record(source, info)
        # torch looks for names in the folder of the first entry, whatever the case of letters
        first, slash, name = record.name.partition("/")
        folder = folder or first
        lower = name.lower()
        if not slash or first != folder:
            raise Damaged(
                "malformed", f"{record.name!r} is not in the folder {folder!r} of the zip"
            )
        if lower in folded:
            raise Damaged("duplicate", f"the zip holds {record.name!r} more than once")
        if lower in SPECIAL and name not in SPECIAL:
            raise Damaged(
                "hostile",
                f"the zip holds {record.name!r}, which torch would confuse with another entry",
            )
        folded.add(lower)
        found[name] = record
        parts.append((record.name, info.header_offset, record.start + record.packed))
    # entries fill the file: none shares bytes with another, and nothing lies between them
    parts.append(("the zip directory", directory, directory))
    for (before, _, end), (after, start, _) in pairwise(parts):
        if start < end:
            raise Damaged("hostile", f"{after!r} and {before!r} share the same bytes of the file")
        if start - end not in DESCRIPTORS or (start and not end):
            raise Damaged(
                "hostile", f"{start - end:,} bytes lie hidden between {before} and {after}"
            )
    return found


def _directory(source: FileSlice) -> tuple[int, int]:
    """Return number of entries and offset of the directory; it has to be where all readers look."""
    end = source.size - END.size
    signature, disk, first_disk, here, count, size, start, comment = END.unpack(
        source.at(max(0, end), END.size).ljust(END.size)
    )
    if signature != b"PK\x05\x06" or comment:
        raise Damaged("torn", "the zip has no directory at its end: its save never finished")
    locator = source.at(max(0, end - LOCATOR.size), LOCATOR.size)
    if locator[:4] == b"PK\x06\x07":
        end -= LOCATOR.size + END64.size
        named = LOCATOR.unpack(locator)[2]
        if end < 0 or named != end:
            raise Damaged(
                "hostile",
                f"the zip64 record is not at byte {named:,}, where the end record places it",
            )
        signature, length, _, _, disk, first_disk, here, count, size, start = END64.unpack(
            source.exactly(end, END64.size)
        )
        if signature != b"PK\x06\x06" or length != END64.size - 12:
            raise Damaged("malformed", "the zip64 record is malformed")
    if disk or first_disk or here != count:
        raise Damaged("malformed", "the zip is one of several parts")
    if start + size != end:
        raise Damaged(
            "hostile" if start + size < end else "torn",
            f"the zip directory should end at byte {start + size:,}, but its end record is "
            f"at {end:,}: bytes were inserted or removed",
        )
    if size > LARGEST_INDEX:
        raise Damaged(
            "limit", f"the zip directory has {size:,} bytes; at most {LARGEST_INDEX:,} are read"
        )
    return count, start


def _check_name(name: str) -> None:
    parts = name.replace("\\", "/").split("/")
    if name.startswith("/") or ".." in parts or parts[0][1:2] == ":":
        raise Damaged(
            "hostile", f"the zip holds {name!r}, which would be unpacked outside its folder"
        )
    # torch cuts off names that are longer
    if len(name) > 250 or not name.isascii() or not name.isprintable():
        raise Damaged("malformed", f"the zip holds an entry with the name {name[:80]!r}")


def _record(source: FileSlice, info: zipfile.ZipInfo) -> ZipRecord:
    """Compare an entry of the directory with the header in front of its bytes."""
    name = info.orig_filename
    _check_name(name)
    # sizes beyond 32 bits stand in one extra field of type 1; readers differ about a second one
    extra = info.extra
    is_plain = not extra or (extra[:2] == b"\1\0" and extra[2] + 256 * extra[3] == len(extra) - 4)
    is_encrypted = info.flag_bits & 1
    if is_encrypted or info.volume or not is_plain:
        raise Damaged(
            "malformed",
            f"{name!r} is encrypted, in another part of the zip, or has a damaged extra field",
        )
    at = info.header_offset
    local = source.at(at, LOCAL.size)
    if len(local) < LOCAL.size or local[:4] != ZIP_START:
        raise Damaged("torn", f"the header of {name!r} is not where the zip directory says")
    *_, local_name, local_extra = LOCAL.unpack(local)
    if source.at(at + LOCAL.size, local_name) != name.encode():
        raise Damaged(
            "malformed", f"{name!r} has another name in its header than in the zip directory"
        )
    # the lengths of the directory must not be used: torch pads the extra field of the header only,
    # so that every storage begins at a multiple of 64 bytes
    start = at + LOCAL.size + local_name + local_extra
    packed = info.compress_size
    if start + packed > source.size:
        raise Damaged("torn", f"{name!r} should end at byte {start + packed:,} of {source.size:,}")
    is_stored = info.compress_type == 0 and packed == info.file_size
    return ZipRecord(name, start, info.file_size, info.CRC, packed, is_stored)


# --- The value of a pickle: names not on the list, rates, numbers, and tensors with their bytes.

NEEDLESS = "which a checkpoint of tensors does not need"
MOST_DEPTH = 100
"""Containers inside containers."""
RATES: dict[str, Any] = table(
    "lr=lr initial_lr=initial_lr max_lr=max_lr base_lrs=base_lr _last_lr=last_lr"
)
"""Keys of optimizer and scheduler states -> what kind of learning rate stands there."""
STEPS = ("global_step", "step", "iteration", "iter", "num_steps", "steps")
CONTAINERS = (dict, list, tuple, set, frozenset, PickledObject)
UNNAMED = ("_modules", "_parameters")
"""Keys of a pickled module that are left out of names. `_buffers` stays: it tells the role."""


def read_value(reader: PickleReader, layout: FileLayout, *, scripted: bool = False) -> Any:
    """Return the value of a file that is a pickle, and report every name not on the list."""
    try:
        return reader.value()
    # also where reading stops before the end
    finally:
        names: dict[str, list[str]] = {}
        for name, called in reader.names.items():
            kind = trust(name, called=called, scripted=scripted)
            names.setdefault(kind, []).append(str(name))
        for hostile in names.get("hostile", ()):
            detail = f"names {hostile}, {NEEDLESS}; loading it with pickle could run code"
            layout.add("hostile", f"{detail}; nothing was run")
        for called_class in names.get("calls", ()):
            layout.add(
                "global",
                f"names {called_class}, {NEEDLESS}; loading it with pickle would call it with "
                "arguments from the file. Where it is a class of your own, save its value instead",
            )
        if "unknown" in names:
            layout.add(
                "global",
                f"names {first_few(names['unknown'], 5)}, {NEEDLESS}; loading it with pickle would "
                "import and run code that is not on stepguard's list. Where it is your own, "
                "save the state_dict instead of the object",
            )


def walk(layout: FileLayout, root: Any, role: Role | None = None, prefix: str = "") -> None:
    """Add every tensor, learning rate, step and non-finite number of a value."""
    role = role or structural(root)
    seen = set()
    visited = 0
    # a list instead of recursion: the file decides how deep its containers are
    todo: list[tuple[tuple[Any, ...], Role | None, Any]] = [((), role, root)]
    while todo:
        keys, role, value = todo.pop()
        visited += 1
        if visited > MOST_VALUES or len(layout.tensors) > MOST_STACK:
            detail = f"holds more than {MOST_VALUES:,} values or {MOST_STACK:,} tensors"
            layout.add("limit", f"{detail}; the rest was not read")
            return
        if isinstance(value, int | float):
            add_number(layout, keys, role, value)
        elif isinstance(value, TensorRecord):
            name = _name(keys)
            found = role_of_tensor(role, name, value.dtype, parameter=value.parameter)
            add_tensor(layout, f"{prefix}{name}".rstrip("/"), found, value)
        # a pickle can put a list into itself
        elif isinstance(value, CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            if len(keys) >= MOST_DEPTH:
                layout.add(
                    "limit", f"values are nested more than {MOST_DEPTH} deep; the rest was not read"
                )
                continue
            # a checkpoint of several parts, not a state dict, whose tensors are all the model's
            is_parted = not keys and isinstance(value, dict) and dict in map(type, value.values())
            for key, child in reversed(_children(value)):
                if not isinstance(child, str | bytes | None):
                    part = role or _role_of_child(len(keys), key, child, is_parted)
                    todo.append(((*keys, key), part, child))


def _name(keys: tuple[Any, ...]) -> str:
    words = []
    for key in keys:
        if not isinstance(key, str | int | None):
            words.append(type(key).__name__)
        elif key is not None and key not in UNNAMED:
            words.append(str(key))
    return "/".join(words)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if not isinstance(value, PickledObject):
        return list(enumerate(value))
    found: list[tuple[Any, Any]] = list(enumerate(value.arguments))
    for state in value.states():
        found += state.items() if isinstance(state, dict) else [(None, state)]
    found += enumerate(value.items)
    if value.entries:
        found += value.entries.items()
    return found


def _role_of_child(depth: int, key: Any, child: Any, is_parted: bool) -> Role | None:
    role = structural(child)
    if role is not None:
        return role
    # names divide a checkpoint only near the top; further down they are the model's own
    if isinstance(child, TensorRecord):
        role = role_of_part(key)
        is_state = role == "rng" and child.dtype in ("uint8", "")
        if role == "ema" or is_state:
            return role
        return "other" if is_parted else None
    if depth == 0 or (depth == 1 and isinstance(child, dict | list | PickledObject)):
        return role_of_part(key)
    return None


def add_number(layout: FileLayout, keys: tuple[Any, ...], role: Role | None, value: float) -> None:
    """Add a number: the step, a learning rate, or one that is not finite."""
    if isinstance(value, int):
        is_step = len(keys) == 1 and keys[0] in STEPS and type(value) is int
        if is_step and layout.step is None and value >= 0:
            layout.step = value
        return
    # schedulers keep lists of rates: then the name stands above the index
    named = [key for key in keys[-2:] if isinstance(key, str)]
    if not math.isfinite(value):
        layout.numbers.append((_name(keys), role or "other", value))
    elif role in ("optimizer", "scheduler") and named and named[-1] in RATES:
        kind = RATES[named[-1]]
        layout.rates.append(Rate(file=str(layout.path), name=_name(keys), kind=kind, value=value))


def add_tensor(layout: FileLayout, name: str, role: Role, record: TensorRecord) -> None:
    """Add a tensor with its bytes in the file, or a problem that says why not."""
    storage = record.storage
    if storage is None:
        return
    storage.is_used = True
    if not storage.dtype:
        raise Damaged("malformed", f"{name} is made of bytes that are not a storage")
    if storage.start == -1:
        layout.add(
            "format",
            "is written in protocol 2 and was not scanned",
            tensor=name,
            severity="warning",
        )
        return
    if storage.held != storage.size:
        detail = (
            f"its storage {storage.key} has {storage.held:,} bytes in the file and "
            f"{storage.size:,} in the pickle"
        )
        kind: Any = "missing" if storage.start is None else "torn"
        layout.add(kind, detail, tensor=name, role=role)
        return
    # torch writes no record for a storage without bytes
    if storage.start is None:
        return
    shape = record.shape
    width = SIZES[record.dtype]
    elements = math.prod(shape)
    is_sound = min((record.offset, *shape), default=0) >= 0
    if record.stride is not None:
        fits = len(shape) == len(record.stride) and min(record.stride, default=0) >= 0
        is_sound = is_sound and fits
        # as torch's as_strided: dimensions may overlap, a stride of 0 repeats one element
        if elements:
            reach = zip(shape, record.stride, strict=False)
            elements = 1 + sum((size - 1) * step for size, step in reach)
    if not is_sound or (record.offset + elements) * width > storage.held:
        detail = (
            f"shape {shape[:8]} at offset {record.offset} does not fit into its storage of "
            f"{storage.held:,} bytes"
        )
        layout.add("malformed", detail, tensor=name, role=role)
        return
    start = storage.start + record.offset * width
    layout.add_tensor(name, role, record.dtype, shape, start, elements * width, storage.start)


# --- Files of torch.save since 1.6: a zip with a pickle and one record for each storage.

PICKLE_NAME = "data.pkl"


def read_zip(source: FileSlice, layout: FileLayout, role: Role | None, prefix: str = "") -> Any:
    """Fill the layout from the pickle and the records of its storages, each with its CRC."""
    records = zip_records(source)
    if PICKLE_NAME not in records:
        names = first_few(sorted(records), 5)
        raise Damaged(
            "format", f"the zip holds no {PICKLE_NAME} but {names}: it is not from torch.save"
        )
    pickled = records[PICKLE_NAME].stored()
    # storages are written as they lie in memory, in the byte order of the machine
    order = records.get("byteorder")
    if order is not None and source.at(order.stored().start, 16).strip() == b"big":
        raise Damaged(
            "format", "it was saved on a big-endian machine, which is not read; save it again here"
        )
    _add_checksums(source, layout, records)
    # this entry makes torch.load hand the archive to torch.jit.load
    scripted = "constants.pkl" in records
    if scripted:
        _check_script(source, layout, records)
    reader = PickleReader(source.part(pickled.start, pickled.size))
    value = read_value(reader, layout, scripted=scripted)
    # torch names the record of a storage by the key in its persistent id
    for key, record in records.items():
        folder, _, name = key.rpartition("/")
        if folder == "data" and record.stored() and name in reader.storages:
            reader.storages[name].start = source.start + record.start
            reader.storages[name].held = record.size
    walk(layout, value, role, prefix)
    # torch reads each one that the pickle names, whether a tensor needs it or not
    for key, storage in reader.storages.items():
        if not storage.is_used and storage.held != storage.size:
            detail = f"has {storage.held:,} bytes in the file and {storage.size:,} in the pickle"
            layout.add("torn", f"storage {key} {detail}")
    return value


def _add_checksums(source: FileSlice, layout: FileLayout, records: dict[str, ZipRecord]) -> None:
    stored = [record for record in records.values() if record.is_stored]
    # with CRCs switched off, torch writes 0 for every record
    if any(record.crc for record in stored if record.size):
        for record in stored:
            start = source.start + record.start
            layout.checksums.append(Checksum(start, record.size, record.name, record.crc))
    else:
        layout.add(
            "checksum",
            "was saved without checksums (torch.serialization.set_crc32_options), so flipped bits "
            "cannot be found",
            severity="warning",
        )


def _check_script(source: FileSlice, layout: FileLayout, records: dict[str, ZipRecord]) -> None:
    """Report code that loading a TorchScript archive runs: its operators can write files."""
    for key, record in records.items():
        # archives of torch 1.3 and before name the record of their code in here
        if key.lower() == "model.json":
            layout.add("global", f"{record.name} is of a TorchScript archive older than torch 1.4")
        if not key.lower().startswith("code/"):
            continue
        text = source.exactly(record.start, min(record.packed, LONGEST_TEXT))
        if not record.is_stored:
            try:
                text = zlib.decompressobj(-zlib.MAX_WBITS).decompress(text, LONGEST_TEXT)
            except zlib.error as error:
                raise Damaged("torn", f"{record.name!r} cannot be unpacked: {error}") from None
        if len(text) < record.size or b"__setstate__" in text:
            layout.add(
                "global",
                f"{record.name} has a __setstate__ in TorchScript, which torch.load "
                "would run, or is too large to be read; nothing was run",
            )


# --- Safetensors.


def read_safetensors(source: FileSlice, layout: FileLayout, role: Role | None) -> Any:
    """Fill the layout; raises Damaged where the header breaks a rule of the format."""
    length = int.from_bytes(source.at(0, 8).ljust(8, b"\xff"), "little")
    if length > source.size - 8:
        raise Damaged(
            "torn", f"its header should have {length:,} bytes, the file has {source.size:,}"
        )
    if length > LARGEST_INDEX:
        raise Damaged(
            "limit",
            f"its header has {length:,} bytes; at most {LARGEST_INDEX:,} are read",
        )
    header = parse_json(source.exactly(8, length), "its header")
    if not isinstance(header, dict):
        raise Damaged("malformed", f"its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    entries = sorted(_header_entry(name, facts) for name, facts in header.items())
    data = 8 + length
    size = source.size - data
    end = 0
    found = {}
    # the format demands that tensors fill the file without gaps and overlaps: a gap can hide
    # other content, and tensors that share bytes make a small file need much memory
    for start, stop, name, dtype, shape in entries:
        if start != end:
            detail = f"begins at byte {start:,} of the data, the one before ends at {end:,}"
            raise Damaged("malformed", f"{name!r} {detail}")
        if stop > size:
            detail = f"should end at byte {data + stop:,}, the file ends at {source.size:,}"
            raise Damaged("torn", f"{name!r} {detail}")
        end = stop
        known = SAFETENSORS.get(dtype, "uint8")
        bits = SAFETENSORS_BITS.get(dtype, 8 * SIZES[known])
        needed = -(-math.prod(shape) * bits // 8)
        found[name] = TensorRecord(StorageRecord(name, known, math.prod(shape)), shape=shape)
        if dtype not in SAFETENSORS and dtype not in SAFETENSORS_BITS:
            layout.add(
                "format", f"has elements of type {dtype[:20]!r}, which is not known", tensor=name
            )
        elif needed != stop - start:
            layout.add(
                "malformed", f"has {stop - start:,} bytes, its shape needs {needed:,}", tensor=name
            )
        else:
            # `optimizer/...`; a name without a slash is the model's or its EMA's
            part, slash, _ = name.partition("/")
            context = role_of_part(part)
            if not slash and context != "ema":
                context = None
            kind = role_of_tensor(role or context, name, known)
            layout.add_tensor(name, kind, known, shape, data + start, stop - start)
    if end < size:
        raise Damaged("malformed", f"{size - end:,} bytes follow the last tensor")
    return found


def _header_entry(name: str, facts: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Return start and end behind the header, name, type and shape of one tensor."""
    match facts:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if (
            is_shape([*shape, start, stop]) and 0 <= start <= stop and min([*shape, 0]) == 0
        ):
            return start, stop, name, dtype, tuple(shape)
    raise Damaged("malformed", f"its header has no usable entry for {name[:80]!r}")


# --- Any file: formats are recognised in the order in which torch.load tries them.

TORCH_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".th", ".pyth"})
SURE_SUFFIXES = TORCH_SUFFIXES | {".safetensors"}
"""Suffixes that promise a checkpoint."""
PICKLE_SUFFIXES = frozenset({".pkl", ".pickle"})
SUFFIXES = SURE_SUFFIXES | PICKLE_SUFFIXES | {".bin"}
"""With those of many kinds of files; one that is not a checkpoint is passed over."""
OLD_STARTS = frozenset(b"(])}cl].IFNSVd")
"""First bytes of a pickle of protocol 0 or 1, which has no header."""


Read = Callable[[FileSlice, FileLayout, Role | None], Any]
"""Fills the layout and returns what the file holds, with records in the place of tensors, or raises
Damaged; the role is what the name of the file says.
"""
STARTS = (ZIP_START, b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes that make a file with a shared suffix worth reading."""
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


def parse(source: FileSlice, layout: FileLayout, role: Role | None) -> Any:
    """Fill the layout with the reader of the format that the first bytes show."""
    # by content, not by name: people rename `.bin` to `.pt` and back
    head = source.at(0, 512)
    if not head:
        raise Damaged("torn", "is empty")
    if head.startswith(ZIP_START):
        layout.format = "torch zip"
        return read_zip(source, layout, role)
    # torch.load unpacks a tar before it tries anything else
    if _is_tar(source):
        raise Damaged(
            "format",
            "is a tar (torch.save before 0.1.10); load it with an old torch and save it again",
        )
    suffix = layout.path.suffix.lower()
    is_header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= source.size
    if is_header or suffix == ".safetensors":
        if suffix != ".safetensors":
            _refuse_pickle(source)
        layout.format = "safetensors"
        return read_safetensors(source, layout, role)
    # an older start may begin anything, so the suffix must say that it is a checkpoint
    if head[0] == pickle.PROTO[0] or (head[0] in OLD_STARTS and suffix in SUFFIXES):
        layout.format = "torch legacy" if head.startswith(LEGACY_START) else "pickle"
        value = read_value(PickleReader(source), layout)
        walk(layout, value, role)
        return value
    if not any(head):
        raise Damaged("torn", "begins with zeros: its content never reached the disk")
    if head[:4] in NOT_READ:
        raise Damaged("format", f"is a {NOT_READ[head[:4]]} file, which is not read here")
    raise Damaged(
        "malformed", f"begins with {head[:8].hex(' ')}, which no known checkpoint format does"
    )


def _is_tar(source: FileSlice) -> bool:
    try:
        tarfile.TarInfo.frombuf(source.at(0, tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _refuse_pickle(source: FileSlice) -> None:
    """Raise Damaged for a safetensors file that torch.load would read as a pickle, by its name."""
    reader = PickleReader(source)
    # they need a stack, or what torch does not give to the first pickle of a file
    if source.at(0, 1) in (pickle.PUT, pickle.PERSID):
        return
    try:
        reader.value()
    except NotPickled:
        if not reader.names:
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
    layout = FileLayout(path)
    with open_file(path) as source:
        content = parse(source, layout, None)
    for problem in layout.problems():
        if problem.kind == "hostile":
            raise Damaged("hostile", problem.detail)
    return content


def has_checkpoint_suffix(path: Path) -> bool:
    """Does the suffix promise or allow a checkpoint?"""
    return path.suffix.lower() in SUFFIXES


def is_checkpoint_name(path: Path) -> bool:
    """Tell a checkpoint by its name; with a shared suffix, only if libraries use such a name."""
    suffix = path.suffix.lower()
    is_known = suffix in SUFFIXES and path.name.lower().startswith(WEIGHTS)
    return is_known or suffix in SURE_SUFFIXES


def is_checkpoint_file(path: Path) -> bool:
    """Tell a checkpoint by its name; of `x.bin`, `x.pkl`, `x.tar` the content decides.

    It is one where torch.load would unpack it as a tar, or import a name for it as a pickle.
    """
    if is_checkpoint_name(path):
        return True
    suffix = path.suffix.lower()
    # tutorials of PyTorch call checkpoints `x.tar`, though they are not tars
    if suffix not in SUFFIXES and suffix != ".tar":
        return False
    try:
        with open_file(path) as source:
            if source.at(0, 4).startswith(STARTS) or _is_tar(source):
                return True
            reader = PickleReader(source)
            try:
                reader.value()
            except NotPickled:
                pass
            except Damaged as damage:
                if damage.kind == "limit" or suffix in PICKLE_SUFFIXES:
                    return True
    except Damaged:
        return False
    # any text has lines; an extension stands for nothing unless the program has registered one
    return any(
        name.module != "copyreg" and name.module.replace(".", "_").isidentifier()
        for name in reader.names
    )


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
    layout = FileLayout(path)
    done = 0
    try:
        with open_file(path) as source:
            layout.size = source.size
            try:
                (read or parse)(source, layout, role_of_file(path.name))
                layout.complete = True
            except Damaged as damage:
                layout.add(damage.kind, damage.detail)
            # also after damage: what was understood up to there is worth reading
            done = scan(source, layout, progress)
    except Damaged as damage:
        layout.add(damage.kind, damage.detail)
    judge(layout, allowed)
    # bytes between the tensors were not read; the bar counts the whole file
    progress(max(0, layout.size - done))
    return layout

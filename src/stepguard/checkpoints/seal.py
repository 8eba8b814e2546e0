"""The seal of a checkpoint: what it holds, with digests of every file, every tensor and itself.

Digests are XXH3-128: they find accidents (torn writes, flipped bits, swapped pages), not forgery.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, ValidationError

from stepguard._errors import StoreError
from stepguard.records.codec import dumps, from_jsonable, to_plain
from stepguard.state.files import Disk, sibling

# --- The seal of a checkpoint: what it holds, with digests of every file, every tensor and
# itself.


SCHEMA = 3
SEAL = "seal.json"
FACTS = "facts.json"
RANK_SEALS = "rank-[0-9][0-9][0-9][0-9][0-9].json"
LARGEST = 1 << 26
"""Bytes of JSON that are written and read at most: a seal of 300 000 tensors."""
_HEAD = re.compile(rb'\{"digest":"([0-9a-f]{32})","seal":')
_TAIL = b"}\n"

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
DigestText = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^\.?[A-Za-z0-9_][A-Za-z0-9._-]{0,200}$")]
"""One name, no path: nothing in a seal can lead out of its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Why this state counts as good."""

    loss: float | None
    """The loss of the last step before."""
    level: float | None
    """What the loss was like in the history."""
    steps_watched: Count
    incidents: Count
    good: bool
    """Finite, past its probation, and its run had not diverged.

    Only such a checkpoint can be the last good one.
    """
    why: str = ""
    """Why it is not good, in words."""
    run: str = ""
    """Which run saved it; another run in the same folder does not go back to it by itself."""
    missing: str = ""
    """What the one rank that wrote it did not have, in words.

    Ranks that came to the save as well have added theirs beside it (`rank-00001.json`).
    """


UNKNOWN = Health(loss=None, level=None, steps_watched=0, incidents=0, good=False)
"""One rank cannot say whether the state of all is good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """One file beside the seal."""

    size: Count
    digest: DigestText
    header: str = ""
    """Digest of what a tensor file holds before its first tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedTensor:
    """One tensor, as torch sees it. Tied tensors are several names of one place in a file."""

    file: FileName
    start: Count
    """Its first byte in the file."""
    dtype: str
    """torch's name: `bfloat16`, `complex64`."""
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    digest: DigestText


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedPart:
    """A tensor of which this file holds a part only."""

    whole: Annotated[tuple[Count, ...], Field(max_length=64)]
    """Shape of all of it."""
    offset: Annotated[tuple[Count, ...], Field(max_length=64)]
    """Where the part begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What makes a folder a checkpoint.

    Where several ranks have written, each has a seal of this form over its own files
    (`rank-00001.json`), and `seal.json` is over all files, those seals among them: it has no
    tensors of its own, and it exists only once every rank has written. Where one rank wrote what
    all ranks hold, others may add such a seal later over what is their own.
    """

    step: Count
    health: Health
    files: dict[FileName, SealedFile]
    tensors: dict[str, SealedTensor]
    serial: Count
    """Counts the checkpoints of a folder: after a rewind a later one can have a lower step."""
    nonfinite: tuple[str, ...] = ()
    """Tensors that hold NaN or Inf, and may: sentinel buffers."""
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    written: str = ""
    ranks: Count = 0
    """How many ranks have a seal of their own beside this one."""
    parts: dict[str, SealedPart] = field(default_factory=dict)
    """Tensors that are parts of larger ones, by name."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a rank has added that is not a tensor: `facts[kind]` is `facts.json[kind][rank]`."""
    schema: int = SCHEMA


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes in memory."""
    return xxhash.xxh3_128(data).hexdigest()


def seal_bytes(seal: Seal) -> bytes:
    """Return the content of `seal.json`: every byte is fixed or covered by the digest."""
    body = dumps(to_plain(seal)).encode()
    return b'{"digest":"' + digest_of(body).encode() + b'","seal":' + body + _TAIL


def read_seal(folder: Path) -> Seal:
    """Read the seal of a checkpoint, proven unaltered; StoreError says what is wrong with it."""
    return parse_seal(read_small(folder / SEAL), folder)


def rank_seal_name(rank: int) -> str:
    """Name of the seal over what one rank has written."""
    return f"rank-{rank:05d}.json"


def read_rank_seals(folder: Path, seal: Seal) -> list[Seal]:
    """Read the seals that hold the tensors: those of all ranks, or the one that there is.

    The one comes first, and after it those that other ranks have added.
    """
    if not seal.ranks:
        return [seal, *read_added_seals(folder, seal).values()]
    found: list[Seal] = []
    for rank in range(seal.ranks):
        name = rank_seal_name(rank)
        content = read_small(folder / name)
        sealed = seal.files.get(name)
        if sealed is None or digest_of(content) != sealed.digest:
            raise StoreError(f"{folder} is not what was sealed: {name} differs.")
        found.append(parse_seal(content, folder, name))
    return found


def read_added_seals(folder: Path, seal: Seal) -> dict[int, Seal]:
    """Read what ranks have added to a checkpoint that another one wrote, by rank."""
    if seal.ranks:
        return {}
    found: dict[int, Seal] = {}
    for path in sorted(folder.glob(RANK_SEALS)):
        found[int(path.stem[5:])] = parse_seal(read_small(path), folder, path.name)
    return found


def parse_seal(content: bytes, folder: Path, name: str = SEAL) -> Seal:
    """Parse the bytes of a `seal.json`."""
    head = _HEAD.match(content)
    if head is None or not content.endswith(_TAIL):
        raise StoreError(f"{folder} has a damaged seal: {name} is not in the format of a seal.")
    body = content[head.end() : -len(_TAIL)]
    if digest_of(body) != head.group(1).decode():
        raise StoreError(f"{folder} has a damaged seal: {name} does not match its own digest.")
    plain = load_json(body, folder / name)
    schema = plain.get("schema")
    if schema != SCHEMA:
        raise StoreError(
            f"{folder} has a seal of schema {schema!r}; this stepguard reads {SCHEMA}: upgrade it."
        )
    try:
        return from_jsonable(Seal, plain)
    except (ValidationError, RecursionError) as fault:
        raise StoreError(f"{folder} has an invalid seal: {first_line(fault)}.") from None


def load_json(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; StoreError for any other bytes."""
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as fault:
        raise StoreError(f"{path} is not readable JSON: {first_line(fault)}.") from None
    if not isinstance(plain, dict):
        raise StoreError(f"{path} holds a JSON {type(plain).__name__}, not an object.")
    return plain


def first_line(fault: BaseException) -> str:
    """Shorten what an exception of another library says, for a message."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text[:200].removesuffix(".")


def read_small(path: Path) -> bytes:
    """Read a whole file of bounded size."""
    fd, size = open_plain(path)
    with os.fdopen(fd, "rb", closefd=True) as file:
        if size > LARGEST:
            raise StoreError(f"{path} has {size} bytes; at most {LARGEST} are read.")
        try:
            # one byte more than expected: a file that grew meanwhile fails its digest
            return file.read(size + 1)
        except OSError as fault:
            raise StoreError(f"{path} cannot be read: {fault.strerror}.") from None


def open_plain(path: Path) -> tuple[int, int]:
    """Open a regular file; returns descriptor and size. Links, FIFOs, devices are refused."""
    try:
        # O_NONBLOCK: opening a FIFO that has no writer must not wait
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing.") from None
    except OSError as fault:
        why = "it is a symbolic link" if path.is_symlink() else fault.strerror
        raise StoreError(f"{path} cannot be opened: {why}.") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise StoreError(f"{path} is not a regular file.")
    return fd, found.st_size


# --- What lies in a folder of checkpoints: sealed ones, damaged ones, leftovers, and `last-good`.


LAST_GOOD = "last-good"
_CHECKPOINT = re.compile(r"step-(\d{1,18})(?:-\d{1,9})?")
_LEFTOVER = re.compile(r"\.(step-\d+(-\d+)?|last-good)\.\d+-\d+\.(tmp|old)")
_POINTER = re.compile(rb"(step-\d{1,18}(?:-\d{1,9})?) ([0-9a-f]{32})\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A sealed checkpoint, known by its seal; its data is proven only when it is opened."""

    path: Path
    step: int
    serial: int
    health: Health
    sizes: dict[str, int]
    """Bytes of its files."""

    @property
    def good(self) -> bool:
        return self.health.good


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint (or the pointer) that was not used, and why."""

    path: Path
    reason: str


def checkpoint_name(step: int, turn: int = 1) -> str:
    """Return `step-100`; after a rewind the same step is saved again, as `step-100-2`."""
    if turn == 1:
        return f"step-{step}"
    return f"step-{step}-{turn}"


def list_entries(folder: Path) -> tuple[list[Entry], list[PassedOver]]:
    """Return the sealed checkpoints, newest first, and those whose seal is missing or damaged."""
    entries: list[Entry] = []
    damaged: list[PassedOver] = []
    for path in _named(folder, _CHECKPOINT):
        try:
            entries.append(entry_of(path))
        except StoreError as fault:
            damaged.append(PassedOver(path, str(fault)))
    entries.sort(key=lambda entry: (entry.serial, entry.step), reverse=True)
    return entries, damaged


def leftovers(folder: Path) -> list[Path]:
    """Return temporary files of writers; the caller must know that none of them is running."""
    return _named(folder, _LEFTOVER)


def entry_of(path: Path) -> Entry:
    """Read a checkpoint's seal, and check that its files are there with the sealed sizes."""
    try:
        found = (path / SEAL).lstat()
    except OSError:
        raise StoreError(f"{path / SEAL} is missing.") from None
    entry = _entry(path, found.st_ino, found.st_mtime_ns, found.st_size)
    for name, sealed in entry.sizes.items():
        try:
            size = (path / name).lstat().st_size
        except OSError:
            raise StoreError(f"{path} is incomplete: {name} is missing.") from None
        if size != sealed:
            raise StoreError(
                f"{path} is incomplete: {name} has {size} bytes, {sealed} were sealed."
            )
    return entry


@lru_cache(maxsize=256)
def _entry(path: Path, inode: int, time: int, size: int) -> Entry:
    """Parse a seal once, as long as its file is the same."""
    seal = read_seal(path)
    return Entry(
        path=path,
        step=seal.step,
        serial=seal.serial,
        health=seal.health,
        sizes={name: sealed.size for name, sealed in seal.files.items()},
    )


def read_pointer(folder: Path) -> Path:
    """Return the checkpoint that `last-good` names; StoreError if it is damaged or outdated."""
    content = read_small(folder / LAST_GOOD)
    match = _POINTER.fullmatch(content)
    if match is None:
        raise StoreError(f"{folder / LAST_GOOD} is damaged: it does not name a checkpoint.")
    path = folder / match.group(1).decode()
    if digest_of(read_small(path / SEAL)) != match.group(2).decode():
        raise StoreError(
            f"{folder / LAST_GOOD} names {path.name} with another seal than the one there."
        )
    return path


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


# --- Decide which checkpoints to remove, and remove them. The last good and the best one stay.


def removable(
    entries: Sequence[Entry], last_good: Path | None, keep: int, keep_every: int | None
) -> list[Entry]:
    """Return the entries, given newest first, that are not new, a milestone, last-good or the best.

    Checkpoints that are not good are counted apart, so that no number of them pushes out a good
    one.
    """
    good = [entry for entry in entries if entry.good]
    doubtful = [entry for entry in entries if not entry.good]
    kept = {entry.path for entry in (*good[:keep], *doubtful[:keep])}
    if keep_every is not None:
        # The newest good checkpoint of every `keep_every`th step.
        newest = {one.step: one.path for one in reversed(good) if one.step % keep_every == 0}
        kept.update(newest.values())
    kept.update(_best(good))
    return [entry for entry in entries if entry.path not in kept and entry.path != last_good]


def _best(good: Sequence[Entry]) -> list[Path]:
    """Return the good checkpoint of the newest run with the lowest level of the loss."""
    best: list[Path] = []
    lowest = math.inf
    for entry in good:
        level = entry.health.level
        if level is not None and entry.health.run == good[0].health.run and level < lowest:
            best = [entry.path]
            lowest = level
    return best


def remove(folder: Path, paths: Sequence[Path], disk: Disk, say: Callable[[str], None]) -> None:
    """Remove checkpoints. What cannot be removed is reported, and left for the next save."""
    hidden: list[Path] = []
    for path in paths:
        with _reported(path, say):
            # rename first, and durably: a half removed folder must not look like a checkpoint
            old = sibling(path, "old")
            disk.rename(path, old)
            hidden.append(old)
    if hidden:
        with _reported(folder, say):
            disk.sync_folder(folder)
            sweep(hidden, disk, say)


def sweep(paths: Sequence[Path], disk: Disk, say: Callable[[str], None]) -> None:
    """Remove what does not have the name of a checkpoint any more, or never had."""
    for path in paths:
        with _reported(path, say):
            if path.is_dir() and not path.is_symlink():
                disk.rmtree(path)
            else:
                disk.unlink(path)


@contextmanager
def _reported(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as fault:
        say(f"{path} cannot be removed ({fault.strerror}); the next save tries again.")

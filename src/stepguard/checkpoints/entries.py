"""What lies in a folder of checkpoints: sealed ones, damaged ones, leftovers, and `last-good`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from stepguard._errors import StoreError
from stepguard.checkpoints.seal import SEAL, Health, digest_of, parse_seal, read_small

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
    written: str
    sizes: dict[str, int]
    """Bytes of its files."""
    seal_digest: str

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

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


Known = dict[tuple[Path, int, int, int], Entry]
"""Entries by path, inode, time and size of the seal, so that an unchanged one is parsed once."""


def list_entries(folder: Path, known: Known | None = None) -> tuple[list[Entry], list[PassedOver]]:
    """Return the sealed checkpoints, newest first, and those whose seal is missing or damaged."""
    entries: list[Entry] = []
    damaged: list[PassedOver] = []
    for path in _named(folder, _CHECKPOINT):
        try:
            entries.append(_known_entry(path, known))
        except StoreError as fault:
            damaged.append(PassedOver(path, str(fault)))
    entries.sort(key=lambda entry: (entry.serial, entry.step), reverse=True)
    return entries, damaged


def leftovers(folder: Path) -> list[Path]:
    """Return temporary files of writers; the caller must know that none of them is running."""
    return _named(folder, _LEFTOVER)


def entry_of(path: Path) -> Entry:
    """Read a checkpoint's seal, and check that its files are there with the sealed sizes."""
    content = read_small(path / SEAL)
    seal = parse_seal(content, path)
    entry = Entry(
        path=path,
        step=seal.step,
        serial=seal.serial,
        health=seal.health,
        written=seal.written,
        sizes={name: sealed.size for name, sealed in seal.files.items()},
        seal_digest=digest_of(content),
    )
    _check_sizes(entry)
    return entry


def _known_entry(path: Path, known: Known | None) -> Entry:
    if known is None:
        return entry_of(path)
    try:
        found = (path / SEAL).lstat()
    except OSError:
        return entry_of(path)
    key = (path, found.st_ino, found.st_mtime_ns, found.st_size)
    if key in known:
        _check_sizes(known[key])
    else:
        known[key] = entry_of(path)
    return known[key]


def _check_sizes(entry: Entry) -> None:
    for name, sealed in entry.sizes.items():
        try:
            size = (entry.path / name).lstat().st_size
        except OSError:
            raise StoreError(f"{entry.path} is not whole: {name} is missing.") from None
        if size != sealed:
            raise StoreError(
                f"{entry.path} is not whole: {name} has {size} bytes, {sealed} were sealed."
            )


def pointer_bytes(name: str, seal_digest: str) -> bytes:
    """Return the content of `last-good`: a name and the digest of the seal it means."""
    return f"{name} {seal_digest}\n".encode()


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

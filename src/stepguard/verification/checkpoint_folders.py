"""Finds the checkpoints below a folder: what belongs together is one, links are never followed out
of the folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepguard.checkpoints.entries import LAST_GOOD
from stepguard.checkpoints.seal import SEAL
from stepguard.records.verification import Problem
from stepguard.verification.bounded_file import special
from stepguard.verification.dcp_format import METADATA, PIECES
from stepguard.verification.files import SUFFIXES, is_checkpoint_name, may_be_checkpoint
from stepguard.verification.sealed import check_store
from stepguard.verification.shards import NUMBERED

Kind = Literal["file", "sealed", "DCP", "transformers", "DeepSpeed"]
TRAINER = frozenset(
    {
        "trainer_state.json",
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scheduler.bin",
        "training_args.bin",
        "adapter_config.json",
        "config.json",
        "random_states_0.pkl",
        "scaler.pt",
    }
)
"""Files that make one checkpoint of a folder with weights."""
QUARANTINE = "quarantine"
SKIPPED = frozenset({QUARANTINE, "__pycache__", "node_modules", "site-packages"})
DEEPEST = 30
MOST_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint: a file, or a folder with the files that make it up."""

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    size: int


@dataclass(slots=True)
class Found:
    """What a walk brought."""

    root: Path
    places: list[Place] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    entries: int = 0

    def warn(self, path: Path, kind: Literal["link", "limit", "unreadable"], detail: str) -> None:
        self.problems.append(Problem(file=str(path), kind=kind, detail=detail, severity="warning"))


def find(root: Path) -> Found:
    """Every checkpoint at `root` (itself one, perhaps) and below it."""
    found = Found(root)
    todo = [(root, 0)]
    while todo:
        folder, depth = todo.pop()
        listing = _listing(folder, found)
        if listing is None:
            continue
        files, folders = listing
        if any(path.name == LAST_GOOD for path in files):
            found.problems.extend(check_store(folder))
        place = whole_folder(folder, files)
        if place is not None:
            found.places.append(place)
        else:
            found.places.extend(
                _single(path)
                for path in files
                if is_checkpoint_name(path) or may_be_checkpoint(path)
            )
        if place is not None and place.kind in ("sealed", "DCP"):
            continue
        if depth < DEEPEST:
            todo.extend((below, depth + 1) for below in folders if not _skipped(below))
        elif folders:
            found.warn(
                folder, "limit", f"lies {DEEPEST} folders deep; what is below it was not looked at"
            )
    found.places.sort(key=lambda place: _natural(place.path))
    return found


def whole_folder(folder: Path, files: list[Path]) -> Place | None:
    """The folder as one checkpoint, if its files belong together."""
    names = {path.name for path in files}
    members = [path for path in files if path.suffix.lower() in SUFFIXES]
    if SEAL in names:
        return _folder(folder, "sealed", files)
    if METADATA in names or any(name.endswith(PIECES) for name in names):
        return _folder(folder, "DCP", files)
    if any("_model_states" in name or name.startswith("zero_pp_rank_") for name in names):
        return _folder(folder, "DeepSpeed", members)
    indexed = any(name.endswith(".index.json") for name in names)
    numbered = any(NUMBERED.match(name) for name in names)
    if indexed or numbered or (members and names & TRAINER):
        return _folder(folder, "transformers", members)
    return None


def _folder(path: Path, kind: Kind, files: list[Path]) -> Place:
    return Place(path, kind, tuple(files), sum(_size(file) for file in files))


def _single(path: Path) -> Place:
    return Place(path, "file", (path,), _size(path))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _skipped(folder: Path) -> bool:
    """Hidden folders, temporary ones of a save, those moved away, and the evidence of bad steps."""
    is_evidence = folder.name == "incidents" and (folder.parent / "journal.jsonl").exists()
    return folder.name.startswith(".") or folder.name in SKIPPED or is_evidence


def _listing(folder: Path, found: Found) -> tuple[list[Path], list[Path]] | None:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        found.warn(folder, "unreadable", f"cannot be listed: {error.strerror}")
        return None
    found.entries += len(entries)
    if found.entries > MOST_ENTRIES:
        found.warn(folder, "limit", f"more than {MOST_ENTRIES:,} files; the rest was not looked at")
        return None
    files, folders = [], []
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            if _follow(path, found):
                files.append(path)
        elif entry.is_dir(follow_symlinks=False):
            folders.append(path)
        elif not entry.name.startswith(".") or entry.name == METADATA:
            files.append(path)  # also a FIFO: it stands where a checkpoint is expected
    return files, folders


def _follow(link: Path, found: Found) -> bool:
    """Only into the blobs of the same Hugging Face cache. A target inside the folder is seen by
    itself.

    A link in the place of a seal stays: the folder is a checkpoint, and its reader refuses the
    link.
    """
    target = Path(os.path.realpath(link))
    if link.parent.parent.name == "snapshots" and target.is_relative_to(
        link.parent.parent.parent.resolve() / "blobs"
    ):
        return target.is_file()
    if link.name in (SEAL, METADATA):
        return True
    looks_like_one = link.suffix.lower() in SUFFIXES or target.is_dir()
    if looks_like_one and target.exists() and not target.is_file() and not target.is_dir():
        detail = f"is a link to {special(target.stat().st_mode)}; it was not opened"
        found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    elif looks_like_one and not target.is_relative_to(found.root.resolve()):
        found.warn(
            link, "link", f"is a link out of the folder, to {target.name!r}; it was not followed"
        )
    elif looks_like_one and not target.exists():
        found.warn(link, "link", "is a link to nothing")
    return False


def _natural(path: Path) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """step-9 before step-10."""
    return tuple(_parts(part) for part in path.parts)


def _parts(text: str) -> tuple[tuple[int, int, str], ...]:
    parts: list[tuple[int, int, str]] = []
    digits = word = ""
    for letter in text + "\0":
        if letter.isascii() and letter.isdigit():
            digits += letter
            continue
        if digits:
            parts += [(1, 0, word), (0, int(digits[:18]), "")]
            digits = word = ""
        word += letter
    return (*parts, (1, 0, word))

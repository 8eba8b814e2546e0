"""Find the checkpoints below a folder; links that lead out of the folder are not followed.

FOLDER_FORMATS is the table of folders that are one checkpoint. To add one: write `x_folder.py` and
add its entry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepguard.checkpoints.entries import LAST_GOOD
from stepguard.checkpoints.seal import SEAL
from stepguard.records.verification import Problem
from stepguard.verification.bounded_file import special_name
from stepguard.verification.dcp_folder import DCP, METADATA
from stepguard.verification.file_formats import (
    has_checkpoint_suffix,
    is_checkpoint_file,
)
from stepguard.verification.format_entry import CheckpointFiles, FolderFormat
from stepguard.verification.huggingface_folder import DEEPSPEED, HUGGINGFACE
from stepguard.verification.sealed_folder import SEALED, check_store

FOLDER_FORMATS: tuple[FolderFormat, ...] = (SEALED, DCP, DEEPSPEED, HUGGINGFACE)
"""The first one that matches the files of a folder checks it."""
QUARANTINE = "quarantine"
SKIPPED = frozenset({QUARANTINE, "__pycache__", "node_modules", "site-packages"})
DEEPEST = 30
MOST_ENTRIES = 200_000


@dataclass(slots=True)
class FoundCheckpoints:
    """The checkpoints below a folder, and what was wrong with the folder itself."""

    root: Path
    checkpoints: list[CheckpointFiles] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    entries: int = 0
    """Files and folders that were listed."""

    def warn(self, path: Path, kind: Literal["link", "limit", "unreadable"], detail: str) -> None:
        self.problems.append(Problem(file=str(path), kind=kind, detail=detail, severity="warning"))


def find_checkpoints(root: Path, exclude: Collection[str] = ()) -> FoundCheckpoints:
    """Find every checkpoint at `root` (it may be one itself) and below it, but not in the folders
    named in `exclude`.
    """
    found = FoundCheckpoints(root)
    todo = [(root, 0)]
    while todo:
        folder, depth = todo.pop()
        listing = _listing(folder, found)
        if listing is None:
            continue
        files, folders = listing
        if any(path.name == LAST_GOOD for path in files):
            found.problems.extend(check_store(folder))
        _add_checkpoints(folder, files, found)
        if not folders:
            continue
        if depth == DEEPEST:
            detail = f"lies {DEEPEST} folders deep; what is below it was not searched"
            found.warn(folder, "limit", detail)
            continue
        for below in folders:
            if not _is_skipped(below) and below.name not in exclude:
                todo.append((below, depth + 1))
    found.checkpoints.sort(key=lambda checkpoint: _natural(checkpoint.path))
    return found


def single_file(path: Path) -> CheckpointFiles:
    """Return a file as a checkpoint of its own."""
    return CheckpointFiles(path, (path,), _size(path))


def _add_checkpoints(folder: Path, files: list[Path], found: FoundCheckpoints) -> None:
    """Add the folder as one checkpoint, or each of its files."""
    for kind in FOLDER_FORMATS:
        if kind.matches(files):
            members = files
            if not kind.all_files:
                members = [path for path in files if has_checkpoint_suffix(path)]
            size = sum(map(_size, members))
            found.checkpoints.append(CheckpointFiles(folder, tuple(members), size, kind))
            return
    for path in files:
        if is_checkpoint_file(path):
            found.checkpoints.append(single_file(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_skipped(folder: Path) -> bool:
    """Skip hidden and temporary folders, moved checkpoints, and the tensors of bad steps."""
    if folder.name.startswith(".") or folder.name in SKIPPED:
        return True
    return folder.name == "incidents" and (folder.parent / "journal.jsonl").exists()


def _listing(folder: Path, found: FoundCheckpoints) -> tuple[list[Path], list[Path]] | None:
    """Return the files and the folders in a folder; None if it cannot be listed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        found.warn(folder, "unreadable", f"cannot be listed: {error.strerror}")
        return None
    found.entries += len(entries)
    if found.entries > MOST_ENTRIES:
        found.warn(folder, "limit", f"more than {MOST_ENTRIES:,} files; the rest was not searched")
        return None
    files = []
    folders = []
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            if _is_followed(path, found):
                files.append(path)
        elif entry.is_dir(follow_symlinks=False):
            folders.append(path)
        elif not entry.name.startswith(".") or entry.name == METADATA:
            # also a FIFO or device: it stands where a checkpoint is expected, and is reported
            files.append(path)
    return files, folders


def _is_followed(link: Path, found: FoundCheckpoints) -> bool:
    """Follow links only into the same Hugging Face cache; report others to checkpoints."""
    target = Path(os.path.realpath(link))
    if _is_in_same_cache(link, target):
        return target.is_file()
    # such a folder is a checkpoint, and its reader refuses the link
    if link.name in (SEAL, METADATA):
        return True
    if has_checkpoint_suffix(link) or target.is_dir():
        return _is_read_here(link, target, found)
    return False


def _is_in_same_cache(link: Path, target: Path) -> bool:
    # huggingface_hub keeps `snapshots/<revision>/<file>` as links to `blobs/<digest>`
    snapshots = link.parent.parent
    return snapshots.name == "snapshots" and target.is_relative_to(
        snapshots.parent.resolve() / "blobs"
    )


def _is_read_here(link: Path, target: Path, found: FoundCheckpoints) -> bool:
    """Report a link that is not followed; one to a file that the search does not find is read."""
    root = found.root.resolve()
    if target.exists() and not target.is_file() and not target.is_dir():
        detail = f"is a link to {special_name(target.stat().st_mode)}; it was not opened"
        found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    elif not target.is_relative_to(root):
        detail = f"is a link out of the folder, to {target.name!r}; it was not followed"
        detail += ": verify its target by its own path"
        found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    elif not target.exists():
        found.warn(link, "link", "is a link to nothing")
    else:
        folders = [folder for folder in (target, *target.parents) if folder.is_relative_to(root)]
        is_hidden = any(_is_skipped(folder) for folder in folders if folder != root)
        if target.is_file():
            return is_hidden or not is_checkpoint_file(target)
        if is_hidden:
            detail = f"is a link to {target.name!r}, where nothing was searched; give its own path"
            found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    return False


def _natural(path: Path) -> list[list[tuple[int, int, str]]]:
    """Sort key by numbers: step-9 before step-10."""
    return [_natural_words(part) for part in path.parts]


def _natural_words(text: str) -> list[tuple[int, int, str]]:
    """Split into words and numbers; a number sorts before a word."""
    words: list[tuple[int, int, str]] = []
    for number, word in re.findall(r"([0-9]+)|([^0-9]+)", text):
        if number:
            # int() of a name of thousands of digits is refused
            words.append((0, int(number[:18]), ""))
        else:
            words.append((1, 0, word))
    return words

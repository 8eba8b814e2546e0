"""Move bad checkpoints to `quarantine/` and back: renames inside one folder, listed in a manifest.

The manifest is written before the first rename. Whether a checkpoint was really moved is asked of
the folder itself, so a crash at any point leaves nothing that `undo` does not understand.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from stepguard._errors import StoreError
from stepguard.check.folders import DATA_SUFFIX, INDEX_SUFFIX, METADATA, CheckpointFiles
from stepguard.check.scan import Damaged
from stepguard.check.torch_file import is_checkpoint_file, is_checkpoint_name
from stepguard.check.verify import QUARANTINE, file_digest, find_checkpoints
from stepguard.records.checks import Verification
from stepguard.records.codec import from_jsonable
from stepguard.state.files import sync, write_file

MANIFEST = "manifest.json"
UNPROVEN = frozenset({"limit", "unreadable", "format", "link", "lr", "global", "diverged"})
"""Errors that say that a file could not be judged, or not be resumed from, not that it is bad."""
MOST_REASONS = 10


class Move(NamedTuple):
    """One file or folder and its new place; both paths are relative to the folder, with `/`."""

    original: str
    place: str
    reasons: tuple[str, ...]
    digests: dict[str, str]
    """XXH3-128 of every file that is moved."""
    size: int
    moved: str = ""
    """When, in UTC."""


def is_bad(found: Verification) -> bool:
    """Was the checkpoint shown to be bad? One that could only not be read stays where it is."""
    return any(problem.kind not in UNPROVEN for problem in found.errors)


def checkpoints_below(root: Path) -> list[CheckpointFiles]:
    """Return the checkpoints below a folder; StoreError if the folder is one itself."""
    checkpoints, _ = find_checkpoints(root)
    for checkpoint in checkpoints:
        if checkpoint.path == root and not _holds_others(checkpoint, checkpoints):
            raise StoreError(f"{root} is a checkpoint itself; give the folder above it.")
    return checkpoints


def plan(
    root: Path, checkpoints: Sequence[CheckpointFiles], bad: Iterable[Verification]
) -> list[Move]:
    """Decide what to move where. A folder moves as a whole, unless other checkpoints lie in it."""
    by_path = {str(checkpoint.path): checkpoint for checkpoint in checkpoints}
    moves = []
    taken = set()
    for found in bad:
        checkpoint = by_path[found.path]
        paths = [checkpoint.path]
        if checkpoint.format and _holds_others(checkpoint, checkpoints):
            indices = checkpoint.path.glob(f"*{INDEX_SUFFIX}")
            paths = [*checkpoint.files, *(path for path in indices if not path.is_symlink())]
        for path in paths:
            if path.is_symlink() or not _is_below(root, path.parent):
                raise StoreError(f"{path} leads out of {root}; nothing was moved.")
            original = path.relative_to(root).as_posix()
            place = f"{QUARANTINE}/{original}"
            number = 1
            while place in taken or os.path.lexists(root / place):
                number += 1
                place = f"{QUARANTINE}/{original}.{number}"
            taken.add(place)
            moves.append(
                Move(
                    original=original,
                    place=place,
                    reasons=_reasons(found),
                    digests={},
                    size=checkpoint.size,
                )
            )
    return moves


def _reasons(found: Verification) -> tuple[str, ...]:
    reasons = []
    for error in found.errors:
        if error.kind not in UNPROVEN:
            tensor = f"{error.tensor}: " if error.tensor else ""
            reasons.append(f"{error.kind}: {tensor}{error.detail}")
    if len(reasons) > MOST_REASONS:
        reasons[MOST_REASONS:] = [f"and {len(reasons) - MOST_REASONS} more"]
    return tuple(reasons)


def apply(root: Path, moves: Sequence[Move]) -> list[Move]:
    """Write the manifest, then rename. Returns what was moved."""
    if not moves:
        return []
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    complete = [move._replace(digests=_digests(root / move.original), moved=now) for move in moves]
    _write_manifest(root, [*read_manifest(root), *complete])
    for move in complete:
        _rename(root, move.original, move.place)
    return complete


def undo(root: Path) -> tuple[list[Move], list[tuple[Move, str]]]:
    """Move everything back; returns what came back and what stays, with the reason."""
    back = []
    stays = []
    folder = root / QUARANTINE
    for move in read_manifest(root):
        # a crash came before its rename, or an earlier undo moved it back
        if not os.path.lexists(root / move.place):
            continue
        if os.path.lexists(root / move.original):
            stays.append((move, f"{move.original} exists again"))
        elif not _is_what_was_moved(root, move):
            stays.append((move, "is not the checkpoint that the manifest describes"))
        else:
            _rename(root, move.place, move.original)
            back.append(move)
    if stays:
        _write_manifest(root, [move for move, _ in stays])
    else:
        (folder / MANIFEST).unlink(missing_ok=True)
    # remove folders that are empty now, the longest paths first
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
    return back, stays


def read_manifest(root: Path) -> list[Move]:
    """Return the moves of earlier calls; StoreError if the manifest is damaged or leads outside."""
    path = root / QUARANTINE / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        moves = [from_jsonable(Move, entry) for entry in data["moves"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read ({type(error).__name__}); move the files back by hand."
        ) from error
    for move in moves:
        original = PurePosixPath(move.original)
        # as `plan` names it: nothing else of the folder can be the goal of an undo
        place = re.escape(f"{QUARANTINE}/{move.original}") + r"(\.[0-9]+)?"
        is_ours = original.parts and re.fullmatch(place, move.place)
        if not is_ours or ".." in original.parts or original.is_absolute():
            raise StoreError(
                f"{path} names a path outside its folder, or one that no checkpoint was "
                "moved to; stepguard did not write it."
            )
    return moves


def _is_below(root: Path, folder: Path) -> bool:
    return folder.resolve().is_relative_to(root.resolve())


def _is_what_was_moved(root: Path, move: Move) -> bool:
    """Is the thing in quarantine a checkpoint, in no hidden folder, with the bytes it had?

    A manifest that came with a download could put a file to where a program looks for one.
    """
    path = root / move.place
    name = Path(move.original)
    if path.is_symlink() or any(part.startswith(".") for part in name.parts[:-1]):
        return False
    if path.is_dir():
        is_checkpoint = any(each.path == path for each in find_checkpoints(path)[0])
    else:
        is_part = name.name.endswith((METADATA, DATA_SUFFIX, INDEX_SUFFIX))
        is_checkpoint = is_part or is_checkpoint_name(name) or is_checkpoint_file(path)
    return is_checkpoint and list(_digests(path).values()) == list(move.digests.values())


def _holds_others(checkpoint: CheckpointFiles, checkpoints: Sequence[CheckpointFiles]) -> bool:
    return any(
        other.path != checkpoint.path and other.path.is_relative_to(checkpoint.path)
        for other in checkpoints
    )


def _rename(root: Path, source: str, target: str) -> None:
    path = root / source
    goal = root / target
    goal.parent.mkdir(parents=True, exist_ok=True)
    for parent in (path.parent, goal.parent):
        if not _is_below(root, parent):
            raise StoreError(
                f"{parent} is a link that leads out of {root}; {source} was not moved."
            )
    # rename() replaces what is there without asking
    if os.path.lexists(goal):
        raise StoreError(f"{goal} exists; {source} was not moved.")
    try:
        path.rename(goal)
        # the new name first: after a power cut a checkpoint may have two names, but never none
        sync(goal.parent)
        sync(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be moved to {goal}: {error.strerror}; --undo moves back what was moved."
        ) from error


def _write_manifest(root: Path, moves: Sequence[Move]) -> None:
    folder = root / QUARANTINE
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link; remove it first. Nothing was moved.")
    data = {"schema": 1, "moves": [move._asdict() for move in moves]}
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    write_file(folder / MANIFEST, text.encode())


def _digests(path: Path) -> dict[str, str]:
    files = {path.name: path}
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*"))}
    digests = {}
    for name, file in files.items():
        if stat.S_ISREG(file.lstat().st_mode):
            try:
                digests[name] = file_digest(file)
            except Damaged as damage:
                digests[name] = f"unreadable: {damage.detail}"
    return digests

"""Move bad checkpoints to `quarantine/` and back: renames inside one folder, listed in a manifest.

The manifest is written before the first rename. Whether a checkpoint was really moved is asked of
the folder itself, so a crash at any point leaves nothing that `undo` does not understand.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from stepguard._errors import StoreError
from stepguard.records.checks import Problem, Verification
from stepguard.state.files import sync, write_file
from stepguard.verification.file_formats import is_checkpoint_file, is_checkpoint_name
from stepguard.verification.folders import DATA_SUFFIX, INDEX_SUFFIX, METADATA
from stepguard.verification.path_check import QUARANTINE, find_checkpoints
from stepguard.verification.scan import CheckpointFiles

MANIFEST = "manifest.json"
SCHEMA = 1
UNPROVEN = frozenset({"limit", "unreadable", "format", "link", "lr", "global", "diverged"})
"""Errors that say that a file could not be judged, or not be resumed from, not that it is bad."""
PIECE = 1 << 20
MOST_REASONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
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
    checkpoints = find_checkpoints(root).checkpoints
    for checkpoint in checkpoints:
        if checkpoint.path == root and not _holds_others(checkpoint, checkpoints):
            raise StoreError(f"{root} is a checkpoint itself; give the folder above it.")
    return checkpoints


def plan(
    root: Path, checkpoints: Sequence[CheckpointFiles], bad: Iterable[Verification]
) -> list[Move]:
    """Decide what to move where. A folder moves as a whole, unless other checkpoints lie in it."""
    by_path = {str(checkpoint.path): checkpoint for checkpoint in checkpoints}
    moves: list[Move] = []
    taken: set[str] = set()
    for found in bad:
        checkpoint = by_path[found.path]
        for path in _paths_to_move(checkpoint, checkpoints):
            _refuse_outside(root, path)
            original = path.relative_to(root).as_posix()
            place = _free_place(root, original, taken)
            taken.add(place)
            moves.append(
                Move(
                    original=original,
                    place=place,
                    reasons=_reasons(found.errors),
                    digests={},
                    size=checkpoint.size,
                )
            )
    return moves


def apply(root: Path, moves: Sequence[Move]) -> list[Move]:
    """Write the manifest, then rename. Returns what was moved."""
    if not moves:
        return []
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    complete = []
    for move in moves:
        complete.append(replace(move, digests=_digests(root / move.original), moved=now))
    _write_manifest(root, [*read_manifest(root), *complete])
    for move in complete:
        _rename(root, move.original, move.place)
    return complete


def undo(root: Path) -> tuple[list[Move], list[tuple[Move, str]]]:
    """Move everything back; returns what came back and what stays, with the reason."""
    back: list[Move] = []
    stays: list[tuple[Move, str]] = []
    for move in read_manifest(root):
        # a crash came before its rename, or an earlier undo moved it back
        if not os.path.lexists(root / move.place):
            continue
        if os.path.lexists(root / move.original):
            stays.append((move, f"{move.original} exists again"))
            continue
        if not _is_what_was_moved(root, move):
            stays.append((move, "is not the checkpoint that the manifest describes"))
            continue
        _rename(root, move.place, move.original)
        back.append(move)
    if stays:
        _write_manifest(root, [move for move, _ in stays])
    else:
        (root / QUARANTINE / MANIFEST).unlink(missing_ok=True)
    _remove_empty_folders(root / QUARANTINE)
    return back, stays


def read_manifest(root: Path) -> list[Move]:
    """Return the moves of earlier calls; StoreError if the manifest is damaged or leads outside."""
    path = root / QUARANTINE / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        moves = [Move(**{**entry, "reasons": tuple(entry["reasons"])}) for entry in data["moves"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read ({type(error).__name__}); move the files back by hand."
        ) from error
    for move in moves:
        is_inside = _is_inside(move.original) and _is_inside(move.place)
        # as `_free_place` names it: nothing else of the folder can be the goal of an undo
        place = f"{QUARANTINE}/{move.original}"
        number = str(move.place).removeprefix(place).removeprefix(".")
        is_ours = str(move.place).startswith(place) and (not number or number.isdecimal())
        if not is_inside or not is_ours or not isinstance(move.digests, dict):
            raise StoreError(
                f"{path} names a place outside its folder, or another one than a checkpoint was "
                "moved to; it was not written by stepguard."
            )
    return moves


def _is_what_was_moved(root: Path, move: Move) -> bool:
    """Is the thing in quarantine a checkpoint, in no hidden folder, with the bytes it had?

    A manifest that came with a download could put a file to where a program looks for one.
    """
    path = root / move.place
    folders = PurePosixPath(move.original).parts[:-1]
    if path.is_symlink() or any(part.startswith(".") for part in folders):
        return False
    if path.is_dir():
        is_checkpoint = any(each.path == path for each in find_checkpoints(path).checkpoints)
    else:
        name = Path(move.original)
        is_part = name.name.endswith((METADATA, DATA_SUFFIX, INDEX_SUFFIX))
        is_checkpoint = is_part or is_checkpoint_name(name) or is_checkpoint_file(path)
    return is_checkpoint and list(_digests(path).values()) == list(move.digests.values())


def _paths_to_move(
    checkpoint: CheckpointFiles, checkpoints: Sequence[CheckpointFiles]
) -> list[Path]:
    if checkpoint.folder_format is None or not _holds_others(checkpoint, checkpoints):
        return [checkpoint.path]
    indices = checkpoint.path.glob(f"*{INDEX_SUFFIX}")
    return [*checkpoint.files, *(path for path in indices if not path.is_symlink())]


def _holds_others(checkpoint: CheckpointFiles, checkpoints: Sequence[CheckpointFiles]) -> bool:
    for other in checkpoints:
        if other.path != checkpoint.path and other.path.is_relative_to(checkpoint.path):
            return True
    return False


def _reasons(errors: Sequence[Problem]) -> tuple[str, ...]:
    reasons = []
    for error in errors:
        if error.kind not in UNPROVEN:
            tensor = f"{error.tensor}: " if error.tensor else ""
            reasons.append(f"{error.kind}: {tensor}{error.detail}")
    more = len(reasons) - MOST_REASONS
    if more > 0:
        reasons[MOST_REASONS:] = [f"and {more} more"]
    return tuple(reasons)


def _free_place(root: Path, original: str, taken: set[str]) -> str:
    """Return the same path below the quarantine folder, numbered if something is there already."""
    place = f"{QUARANTINE}/{original}"
    number = 1
    while place in taken or os.path.lexists(root / place):
        number += 1
        place = f"{QUARANTINE}/{original}.{number}"
    return place


def _refuse_outside(root: Path, path: Path) -> None:
    if path.is_symlink() or not path.parent.resolve().is_relative_to(root.resolve()):
        raise StoreError(f"{path} leads out of {root}; nothing was moved.")


def _is_inside(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    path = PurePosixPath(text)
    return bool(path.parts) and ".." not in path.parts and not path.is_absolute()


def _rename(root: Path, source: str, target: str) -> None:
    path = root / source
    goal = root / target
    goal.parent.mkdir(parents=True, exist_ok=True)
    for parent in (path.parent, goal.parent):
        if not parent.resolve().is_relative_to(root.resolve()):
            raise StoreError(f"{parent} is a link out of {root}; {source} was not moved.")
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
            f"{path} cannot be moved to {goal}: {error.strerror}; --undo puts back what was."
        ) from error


def _write_manifest(root: Path, moves: Sequence[Move]) -> None:
    folder = root / QUARANTINE
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link; remove it, nothing was moved.")
    data = {"schema": SCHEMA, "moves": [asdict(move) for move in moves]}
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    write_file(folder / MANIFEST, text.encode())


def _digests(path: Path) -> dict[str, str]:
    if not path.is_dir():
        files = {path.name: path}
    else:
        files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*"))}
    digests = {}
    for name, file in files.items():
        if stat.S_ISREG(file.lstat().st_mode):
            digests[name] = _digest(file)
    return digests


def _digest(file: Path) -> str:
    total = xxhash.xxh3_128()
    try:
        with file.open("rb") as stream:
            while piece := stream.read(PIECE):
                total.update(piece)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return total.hexdigest()


def _remove_empty_folders(folder: Path) -> None:
    """Remove folders that an undo emptied; what is not empty stays."""
    if not folder.is_dir():
        return
    # the longest paths first, so that a folder comes after those inside it
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()

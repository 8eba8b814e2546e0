"""Moves bad checkpoints out of the way, and back: atomic renames inside one folder, and a list that
survives a crash.

The list is written before the first rename. Whether a checkpoint was really moved is asked of the
folder itself, so a crash at any point leaves nothing that `undo` does not understand.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from stepguard._errors import StoreError
from stepguard.records.verification import Problem, Verification
from stepguard.state.atomic import sync, write_file
from stepguard.verification.checkpoint_folders import QUARANTINE, Place, find

MANIFEST = "manifest.json"
SCHEMA = 1
UNPROVEN = frozenset({"limit", "unreadable", "format", "link", "lr", "global"})
"""Errors that say that a file could not be judged, not that it is bad."""
PIECE = 1 << 20
MOST_REASONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One file or folder on its way into quarantine; both paths are relative to the folder, with
    `/`.
    """

    original: str
    place: str
    reasons: tuple[str, ...]
    digests: dict[str, str]
    """XXH3-128 of every file that is moved."""
    size: int
    moved: str = ""


def is_bad(found: Verification) -> bool:
    """Shown to be bad; what could only not be read stays where it is."""
    return any(problem.kind not in UNPROVEN for problem in found.errors)


def plan(root: Path, places: Sequence[Place], bad: Iterable[Verification]) -> list[Move]:
    """What to move where. A checkpoint that is a folder goes as a whole, unless others lie inside
    it.
    """
    known = {str(place.path): place for place in places}
    moves: list[Move] = []
    taken: set[str] = set()
    for found in bad:
        place = known[found.path]
        for path in _pieces(root, place, places):
            _refuse_outside(root, path)
            original = path.relative_to(root).as_posix()
            target = _free(root, original, taken)
            taken.add(target)
            moves.append(
                Move(
                    original=original,
                    place=target,
                    reasons=_reasons(found.errors),
                    digests={},
                    size=place.size,
                )
            )
    return moves


def apply(root: Path, moves: Sequence[Move]) -> list[Move]:
    """Write the list, then rename. Returns what was moved."""
    if not moves:
        return []
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    complete = [
        Move(**{**asdict(move), "digests": _digests(root / move.original), "moved": now})
        for move in moves
    ]
    _write(root, [*read_manifest(root), *complete])
    for move in complete:
        _rename(root, move.original, move.place)
    return complete


def undo(root: Path) -> tuple[list[Move], list[tuple[Move, str]]]:
    """Put everything back; returns what came back and what stays, with the reason."""
    back, stays = [], []
    for move in read_manifest(root):
        if not os.path.lexists(root / move.place):
            continue  # the crash came before its rename, or it came back already
        if os.path.lexists(root / move.original):
            stays.append((move, f"{move.original} exists again"))
            continue
        _rename(root, move.place, move.original)
        back.append(move)
    if stays:
        _write(root, [move for move, _ in stays])
    else:
        (root / QUARANTINE / MANIFEST).unlink(missing_ok=True)
    _remove_empty(root / QUARANTINE)
    return back, stays


def read_manifest(root: Path) -> list[Move]:
    """The moves of earlier calls; StoreError if the list is damaged or leads out of the folder."""
    path = root / QUARANTINE / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        moves = [Move(**{**entry, "reasons": tuple(entry["reasons"])}) for entry in data["moves"]]
        inside = all(_plain(text) for move in moves for text in (move.original, move.place))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read ({type(error).__name__}); move the files back by hand."
        ) from error
    if not inside or any(PurePosixPath(move.place).parts[0] != QUARANTINE for move in moves):
        raise StoreError(
            f"{path} names a place outside its folder; it was not written by stepguard."
        )
    return moves


def find_places(root: Path) -> list[Place]:
    """The checkpoints below a folder; StoreError if the folder is one itself."""
    places = find(root).places
    if any(place.path == root for place in places if not _holds_others(place, places)):
        raise StoreError(f"{root} is a checkpoint itself; give the folder above it.")
    return places


def _pieces(root: Path, place: Place, places: Sequence[Place]) -> list[Path]:
    if place.kind == "file" or not _holds_others(place, places):
        return [place.path]
    beside = [path for path in place.path.glob("*.index.json") if not path.is_symlink()]
    return [*place.files, *beside]


def _holds_others(place: Place, places: Sequence[Place]) -> bool:
    return any(
        other.path != place.path and other.path.is_relative_to(place.path) for other in places
    )


def _reasons(errors: Sequence[Problem]) -> tuple[str, ...]:
    texts = [
        f"{e.kind}: {e.tensor + ': ' if e.tensor else ''}{e.detail}"
        for e in errors
        if e.kind not in UNPROVEN
    ]
    more = [f"and {len(texts) - MOST_REASONS} more"] if len(texts) > MOST_REASONS else []
    return (*texts[:MOST_REASONS], *more)


def _free(root: Path, original: str, taken: set[str]) -> str:
    """The same path below the quarantine folder, numbered if something was moved there before."""
    number = 1
    while True:
        suffix = "" if number == 1 else f".{number}"
        target = f"{QUARANTINE}/{original}{suffix}"
        if target not in taken and not os.path.lexists(root / target):
            return target
        number += 1


def _refuse_outside(root: Path, path: Path) -> None:
    if path.is_symlink() or not path.parent.resolve().is_relative_to(root.resolve()):
        raise StoreError(f"{path} leads out of {root}; nothing was moved.")


def _plain(text: Any) -> bool:
    parts = PurePosixPath(text).parts if isinstance(text, str) else ()
    return bool(parts) and ".." not in parts and not PurePosixPath(text).is_absolute()


def _rename(root: Path, source: str, target: str) -> None:
    path, goal = root / source, root / target
    goal.parent.mkdir(parents=True, exist_ok=True)
    for parent in (path.parent, goal.parent):
        if not parent.resolve().is_relative_to(root.resolve()):
            raise StoreError(f"{parent} is a link out of {root}; {source} was not moved.")
    if os.path.lexists(goal):
        raise StoreError(f"{goal} exists; {source} was not moved.")
    try:
        path.rename(goal)
        sync(goal.parent)
        sync(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be moved to {goal}: {error.strerror}; --undo puts back what was."
        ) from error


def _write(root: Path, moves: Sequence[Move]) -> None:
    if (root / QUARANTINE).is_symlink():
        raise StoreError(f"{root / QUARANTINE} is a link; remove it, nothing was moved.")
    data = {"schema": SCHEMA, "moves": [asdict(move) for move in moves]}
    write_file(
        root / QUARANTINE / MANIFEST,
        (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode(),
    )


def _digests(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*")) if path.is_dir() else [path]
    return {
        file.relative_to(path).as_posix() if path.is_dir() else path.name: _digest(file)
        for file in files
        if stat.S_ISREG(file.lstat().st_mode)
    }


def _digest(file: Path) -> str:
    total = xxhash.xxh3_128()
    try:
        with file.open("rb") as stream:
            while piece := stream.read(PIECE):
                total.update(piece)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return total.hexdigest()


def _remove_empty(folder: Path) -> None:
    """Folders that an undo emptied; what is not empty stays."""
    for path in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()

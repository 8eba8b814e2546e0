"""Decide which checkpoints to remove, and remove them. The last good and the best one stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepguard.checkpoints.entries import Entry
from stepguard.state.atomic import Disk, sibling


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
    kept.update(_milestones(good, keep_every))
    kept.update(_best(good))
    return [entry for entry in entries if entry.path not in kept and entry.path != last_good]


def _best(good: Sequence[Entry]) -> set[Path]:
    """Return the good checkpoint of the newest run with the lowest level of the loss."""
    best: Entry | None = None
    lowest = math.inf
    for entry in good:
        level = entry.health.level
        if level is not None and entry.health.run == good[0].health.run and level < lowest:
            best = entry
            lowest = level
    return set() if best is None else {best.path}


def _milestones(good: Sequence[Entry], keep_every: int | None) -> set[Path]:
    """Return the newest good checkpoint of every `keep_every`th step."""
    if keep_every is None:
        return set()
    newest = {entry.step: entry.path for entry in reversed(good) if entry.step % keep_every == 0}
    return set(newest.values())


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

"""Which checkpoints may go, and their removal. The last good one and the best by loss never go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepguard.checkpoints.entries import Entry
from stepguard.state.atomic import Disk, sibling


def superfluous(
    entries: Sequence[Entry], last_good: Path | None, keep: int, keep_every: int | None
) -> list[Entry]:
    """Of entries, newest first, those that are neither new, nor of a milestone, nor the last good
    one, nor the best.

    Checkpoints that are not good are counted apart, so that no number of them pushes a good one
    out.
    """
    good = [entry for entry in entries if entry.good]
    doubtful = [entry for entry in entries if not entry.good]
    kept = {entry.path for entry in (*good[:keep], *doubtful[:keep])}
    kept.update(_milestones(good, keep_every))
    kept.update(_best(good))
    return [entry for entry in entries if entry.path not in kept and entry.path != last_good]


def _best(good: Sequence[Entry]) -> set[Path]:
    """Of the newest run, the good checkpoint with the lowest level of the loss."""
    known = [
        entry
        for entry in good
        if entry.health.level is not None and entry.health.run == good[0].health.run
    ]
    best = min(known, key=lambda entry: entry.health.level or 0.0, default=None)
    return {best.path} if best is not None else set()


def _milestones(good: Sequence[Entry], keep_every: int | None) -> set[Path]:
    """The newest good checkpoint of every `keep_every`th step."""
    if keep_every is None:
        return set()
    newest = {entry.step: entry.path for entry in reversed(good) if entry.step % keep_every == 0}
    return set(newest.values())


def remove(folder: Path, paths: Sequence[Path], disk: Disk, say: Callable[[str], None]) -> None:
    """Take the names away first, durably: a half-removed folder is never found under the name of a
    checkpoint.
    """
    hidden: list[Path] = []
    for path in paths:
        with _said(path, say):
            old = sibling(path, "old")
            disk.rename(path, old)
            hidden.append(old)
    if hidden:
        with _said(folder, say):
            disk.sync_folder(folder)
            sweep(hidden, disk, say)


def sweep(paths: Sequence[Path], disk: Disk, say: Callable[[str], None]) -> None:
    """Remove what does not have the name of a checkpoint any more, or never had."""
    for path in paths:
        with _said(path, say):
            if path.is_dir() and not path.is_symlink():
                disk.rmtree(path)
            else:
                disk.unlink(path)


@contextmanager
def _said(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """What cannot be removed harms nothing but space: it is said, and left for the next save."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as fault:
        say(f"{path} cannot be removed ({fault.strerror}); the next save tries again.")

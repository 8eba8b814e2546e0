"""The runs below a folder, by name. A name that is not among them opens nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from stepguard._errors import JournalError
from stepguard.report.story.reader import belongs_to_run_above, is_journal

DEEPEST = 5
"""Folders below the given one in which runs are looked for."""
MOST_RUNS = 2000
SKIPPED = frozenset({"incidents", "checkpoints", "capsule", "__pycache__", "node_modules"})


class RunFolders:
    """Finds run folders below `root`, which may be a run itself."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise JournalError(
                f"{root} is not a folder; give a run directory, or a folder with run directories."
            )
        self.root = root.resolve()

    @property
    def single(self) -> bool:
        """Is the folder itself a run?"""
        return _is_run(self.root)

    def names(self) -> list[str]:
        """Names of the runs, as paths below the root; the root itself is its own folder name."""
        if self.single:
            return [self.root.name]
        return sorted(path.relative_to(self.root).as_posix() for path in self._found())

    def path(self, name: str) -> Path | None:
        """The folder of a run; None for anything that is not one of `names`."""
        if self.single:
            return self.root if name == self.root.name else None
        # Built from the name's own parts only: no part can lead up or out.
        parts = name.split("/")
        if any(
            not part or part in SKIPPED or part.startswith(".") or "\\" in part for part in parts
        ):
            return None
        try:
            path = self.root.joinpath(*parts).resolve()
        except (OSError, ValueError):
            return None
        if not path.is_relative_to(self.root) or not _is_run(path):
            return None
        return path

    def _found(self) -> Iterator[Path]:
        count = 0
        for folder, below, _ in os.walk(self.root):
            here = Path(folder)
            depth = len(here.relative_to(self.root).parts)
            if depth and _is_run(here) and not belongs_to_run_above(here):
                count += 1
                yield here
            below[:] = [name for name in below if name not in SKIPPED and not name.startswith(".")]
            if depth >= DEEPEST or count >= MOST_RUNS:
                below.clear()


def _is_run(folder: Path) -> bool:
    try:
        return any(is_journal(path) for path in folder.glob("journal*.jsonl"))
    except OSError:
        return False

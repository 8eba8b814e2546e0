"""What the commands that read checkpoints share: a progress bar for what takes long, and the
rendered result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from stepguard.records.verification import Verification

PATIENCE = 2.0
"""Seconds before a bar appears."""


class Bar:
    """A progress bar on stderr that appears only if reading takes long, and leaves no trace."""

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()
        self._total = self._done = 0
        self._progress: Progress | None = None
        self._task: Any = None

    def plan(self, checkpoints: int, size: int) -> None:
        self._total += size
        if self._progress is not None:
            self._progress.update(self._task, total=self._total)

    def advance(self, count: int) -> None:
        self._done += count
        if self._progress is None and time.monotonic() - self._began > PATIENCE:
            self._show()
        if self._progress is not None:
            self._progress.update(self._task, completed=min(self._done, self._total))

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(self._what, total=self._total)
        self._progress.start()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def verified(paths: Sequence[Path], lr: float | None = None) -> list[Verification]:
    """Each path verified, with a bar over all of them; one that holds nothing stays without parts."""
    from stepguard.verification.api import verify_or_empty

    with Bar("verifying") as bar:
        return [verify_or_empty(path, lr=lr, plan=bar.plan, progress=bar.advance) for path in paths]


def show(found: Sequence[Verification]) -> None:
    """The result on stdout, as wide and colourful as stdout takes it."""
    from stepguard.report import screen
    from stepguard.report.verification import render_checked

    out = sys.stdout
    screen.put(
        render_checked(found, width=screen.columns(out), colour=screen.wants_colour(out)), out
    )


def as_plain(each: Verification) -> dict[str, Any]:
    """The record with what its properties say, for JSON."""
    from stepguard.records.codec import to_plain

    plain = to_plain(each)
    plain["parts"] = [as_plain(part) for part in each.parts]
    return {"ok": each.ok, "corrupt": each.corrupt, **plain}

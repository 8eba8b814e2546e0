"""Shared by the commands that read checkpoints: a progress bar, and the rendered result."""

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
    """A progress bar on stderr that appears if reading takes long, and is erased at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._total = 0
        self._done = 0
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
    """Verify each path, with one bar for all; the result of an empty folder has no parts."""
    from stepguard.verification import verify_or_empty

    with Bar("verifying") as bar:
        return [verify_or_empty(path, lr=lr, plan=bar.plan, progress=bar.advance) for path in paths]


def show(results: Sequence[Verification]) -> None:
    """Print the results on stdout, in its width and colours."""
    from stepguard.report import screen
    from stepguard.report.verification import render_results

    out = sys.stdout
    text = render_results(results, width=screen.columns(out), colour=screen.wants_colour(out))
    screen.put(text, out)


def as_plain(result: Verification) -> dict[str, Any]:
    """Return the record as plain data for JSON, with what its properties say."""
    from stepguard.records.codec import to_plain

    plain = to_plain(result)
    plain["parts"] = [as_plain(part) for part in result.parts]
    return {"ok": result.ok, "corrupt": result.corrupt, **plain}

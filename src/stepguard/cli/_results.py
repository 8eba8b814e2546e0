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

    from stepguard.records.checks import Verification
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import ConfigError, JournalError

if TYPE_CHECKING:
    from stepguard.report.story import Run, StepsOf, Story
from collections.abc import Callable
from typing import TYPE_CHECKING

from stepguard.records.codec import printable

if TYPE_CHECKING:
    from stepguard.report.compare import RunComparison


# --- Shared by the commands that read checkpoints: a progress bar, and the rendered result.


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
    from stepguard.report.checks import render_results

    out = sys.stdout
    text = render_results(results, width=screen.columns(out), colour=screen.wants_colour(out))
    screen.put(text, out)


def as_plain(result: Verification) -> dict[str, Any]:
    """Return the record as plain data for JSON, with what its properties say."""
    from stepguard.records.codec import to_plain

    plain = to_plain(result)
    plain["parts"] = [as_plain(part) for part in result.parts]
    return {"ok": result.ok, "corrupt": result.corrupt, **plain}


# --- Open the RUN argument that the reading commands share.


GIVE = "give a run directory that holds a journal.jsonl, or the file itself"
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or a journal.jsonl itself.")
]
RankOption = Annotated[
    int | None,
    typer.Option(
        "--rank",
        min=0,
        metavar="K",
        help="Whose steps to show, in a run on several ranks; by default the lowest.",
    ),
]
WhichOption = Annotated[
    int | None,
    typer.Option(
        "--run",
        min=1,
        metavar="N",
        help="Which run of a folder that was used for several, from 1; by default the last.",
    ),
]


def open_story(run: Path, rank: int | None = None, *, steps_of: StepsOf = "one") -> Story:
    """Read all journals of the folder; raises a JournalError of one line for what is wrong."""
    from stepguard.report.story import read_story

    try:
        story = read_story(run, rank, steps_of=steps_of)
    except OSError as error:
        raise JournalError(f"{error.filename or run} cannot be read: {error.strerror}.") from error
    refuse_other_file(story)
    return story


def refuse_other_file(story: Story) -> None:
    """Raise where no line is one that stepguard writes; only a journal by its name may be empty."""
    path = story.latest.path
    if not story.empty or (not story.torn and path.name.startswith("journal")):
        return
    raise JournalError(
        f"{path} is not a journal of stepguard: none of its lines can be read; {GIVE}."
    )


def open_run(run: Path, rank: int | None = None, which: int | None = None) -> Run:
    """One run of the folder: the last, or the one asked for."""
    return chosen(open_story(run, rank), which)


def chosen(story: Story, which: int | None) -> Run:
    """The run of this number; ConfigError says how many there are."""
    if which is None:
        return story.latest
    if which > len(story.runs):
        raise ConfigError(f"--run {which}: {story.path} holds {len(story.runs)}; give 1 to that.")
    return story.runs[which - 1]


def folder_of(run: Path) -> Path:
    """The run directory, also where the journal file itself was given."""
    return run if run.is_dir() else run.parent


# --- What commands have in common at the terminal: clean lines, and a question before code is
# run.


YesOption = Annotated[
    bool,
    typer.Option(
        "--yes", help="Run what the capsule names without asking, whoever made the capsule."
    ),
]


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """`typer.echo` of text in which nothing can control the terminal."""
    typer.echo(printable(text), err=err, nl=nl)


def confirm_code(yes: bool) -> Callable[[str], bool]:
    """Print what a capsule of somebody else would run, and ask; no terminal means no."""

    def confirmed(command: str) -> bool:
        echo(
            "stepguard: this capsule was not made by you, on this machine, in this folder. "
            f"Replaying it runs: {command}",
            err=True,
        )
        if yes:
            return True
        return sys.stdin.isatty() and typer.confirm("Run it?", err=True)

    return confirmed


# --- Write the web page of a run, or of two.


PAGE = "report.html"
COMPARISON = "compare.html"


def write_page(text: str, out: Path) -> None:
    """Write the page to a file and say where, or to stdout for `-`."""
    from stepguard.report.plot import replace_file

    if str(out) == "-":
        echo(text)
        return
    try:
        replace_file(out, text.encode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror or error}; give another file with --out."
        ) from error
    echo(f"wrote {out}")


def report_page(run: Path, rank: int | None) -> str:
    """The page of a run folder, with what lies in the folders of its incidents."""
    from stepguard.report.page import page_extras, render_page, run_name, story_document

    story = open_story(run, rank, steps_of="all")
    document = story_document(story, run_name(run), page_extras(story, folder_of(run)))
    return render_page(document)


def comparison_page(runs: tuple[Path, Path], rank: int | None, comparison: RunComparison) -> str:
    """Two runs over the same axis, with the table of `stepguard compare` below."""
    from stepguard.report.page import comparison_document, render_page, run_name

    names = [run_name(run) for run in runs]
    if names[0] == names[1]:
        names = [str(run) for run in runs]
    rows: list[list[str]] = [["", *names]]
    for row in comparison.rows:
        rows.append([row.aspect, row.first, row.second])
    for setting, (mine, other) in comparison.settings.items():
        rows.append([setting, _setting(mine), _setting(other)])
    first, second = (open_story(run, rank, steps_of="all").latest for run in runs)
    return render_page(comparison_document((first, names[0]), (second, names[1]), rows))


def _setting(value: object) -> str:
    return "default" if value is None else str(value)

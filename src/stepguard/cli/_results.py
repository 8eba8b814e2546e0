"""What commands share: options, opening a run, progress on stderr, results on stdout, files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepguard._errors import ConfigError, JournalError
from stepguard.records.codec import printable
from stepguard.report.phrases import count

if TYPE_CHECKING:
    from stepguard.records.checks import Verification
    from stepguard.report.story import Run, Story

JsonOption = Annotated[bool, typer.Option("--json", help="Strict JSON instead of text.")]
ScriptOption = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Script to take model, optimizer and loss from."),
]
BuildOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION", help="Function that returns (model, optimizer, loss_fn)."
    ),
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or a journal.jsonl itself.")
]
RankOption = Annotated[
    int | None,
    typer.Option(
        "--rank",
        min=0,
        metavar="K",
        help="The rank whose steps to show; by default the lowest.",
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
GIVE = "give a run directory that holds a journal.jsonl, or the file itself"
PATIENCE = 2.0
"""Seconds before a bar appears."""


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """`typer.echo` of text in which nothing can control the terminal."""
    typer.echo(printable(text), err=err, nl=nl)


def echo_json(fields: object) -> None:
    """Print one line of strict JSON: a record, or a dict."""
    from stepguard.records.codec import dumps, to_plain

    echo(dumps(fields if isinstance(fields, dict) else to_plain(fields)))


def show(render: Callable[..., str], value: object, *, unicode: bool = False) -> None:
    """Print what `render` makes of a value for the width and colours of stdout."""
    from stepguard.report import screen

    out = sys.stdout
    look = {"width": screen.columns(out), "colour": screen.wants_colour(out)}
    if unicode:
        look["unicode"] = screen.takes_unicode(out)
    screen.put(render(value, **look), out)


def exclude(**given: object) -> None:
    """ConfigError where more than one of these options is given."""
    chosen = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one of them.")


def refuse_no_function(**given: str | None) -> None:
    """ConfigError for an option that does not name a function of a module."""
    for name, text in given.items():
        if text is not None and text.count(":") != 1:
            raise ConfigError(f"--{name} {text!r} must look like 'package.module:function'.")


@contextmanager
def writing(path: Path, *, err: bool = False) -> Iterator[None]:
    """Say that a file was written, or raise a ConfigError of one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    echo(f"wrote {path}", err=err)


class Bar:
    """A progress bar on stderr that appears if reading takes long, and is erased at the end."""

    def __init__(self, what: str) -> None:
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
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._total = 0
        self._task = self._progress.add_task(what, total=0)
        self._began = time.monotonic()

    def plan(self, checkpoints: int, size: int) -> None:
        self._total += size
        self._progress.update(self._task, total=self._total)

    def advance(self, count: int) -> None:
        if time.monotonic() - self._began > PATIENCE:
            self._progress.start()
        self._progress.advance(self._task, count)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def verified(paths: Sequence[Path], lr: float | None = None) -> list[Verification]:
    """Verify each path, with one bar for all; the result of an empty folder has no parts."""
    from stepguard.check.verify import check_path

    with Bar("verifying") as bar:
        return [check_path(path, lr=lr, plan=bar.plan, progress=bar.advance) for path in paths]


def as_plain(result: Verification) -> dict[str, Any]:
    """Return the record as plain data for JSON, with what its properties say."""
    from stepguard.records.codec import to_plain

    plain = to_plain(result)
    plain["parts"] = [as_plain(part) for part in result.parts]
    return {"ok": result.ok, "corrupt": result.corrupt, **plain}


# --- Open the RUN argument that the reading commands share.


def open_story(run: Path, rank: int | None = None) -> Story:
    """Read all journals of the folder; raises a JournalError of one line for what is wrong."""
    from stepguard.report.story import read_story

    try:
        story = read_story(run, rank)
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
        raise ConfigError(
            f"--run {which}: {story.path} holds {count(len(story.runs), 'run')}, numbered from 1."
        )
    return story.runs[which - 1]


def folder_of(run: Path) -> Path:
    """The run directory, also where the journal file itself was given."""
    return run if run.is_dir() else run.parent

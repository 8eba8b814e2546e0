"""Open the RUN argument that the reading commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import ConfigError, JournalError

if TYPE_CHECKING:
    from stepguard.report.story import Run, Story
    from stepguard.report.story.reader import StepsOf

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

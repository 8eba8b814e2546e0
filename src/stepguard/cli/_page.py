"""Write the web page of a run, or of two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stepguard._errors import ConfigError, JournalError
from stepguard.cli._run_folder import GIVE, folder_of

if TYPE_CHECKING:
    from stepguard.report.story import Story

PAGE = "report.html"


def write_page(text: str, out: Path) -> None:
    """Write the page to a file and say where, or to stdout for `-`."""
    from stepguard.report.figure import replace_file

    if str(out) == "-":
        typer.echo(text)
        return
    try:
        replace_file(out, text.encode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror or error}; give another file with --out."
        ) from error
    typer.echo(f"wrote {out}")


def report_page(run: Path, rank: int) -> str:
    """The page of a run folder, with what lies in the folders of its incidents."""
    from stepguard.report.page_document import run_name, story_document
    from stepguard.report.page_extras import page_extras
    from stepguard.report.run_page import render_page

    story = open_story(run, rank)
    document = story_document(story, run_name(run), page_extras(story, folder_of(run)))
    return render_page(document)


def open_story(run: Path, rank: int) -> Story:
    """Every run of a folder; raises a JournalError of one line for whatever is wrong with it."""
    from stepguard.report.story import read_story

    try:
        story = read_story(run, rank or None, steps_of="all")
    except OSError as error:
        raise JournalError(f"{error.filename or run} cannot be read: {error.strerror}.") from error
    if story.empty:
        raise JournalError(
            f"{run} is not a run of stepguard: none of its lines can be read; {GIVE}."
        )
    return story

"""`stepguard report RUN`: what happened in a run, from its journal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._page import PAGE, report_page, write_page
from stepguard.cli._run_folder import (
    RankOption,
    RunArgument,
    WhichOption,
    chosen,
    folder_of,
    open_story,
)
from stepguard.cli._terminal import echo

if TYPE_CHECKING:
    from stepguard.report.summary import RunSummary


def report(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown", metavar="PATH", help="Write Markdown to this file; - is stdout."
        ),
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write one web page that opens from disk.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="With --html: where to; - is stdout. Default: report.html in the run directory.",
        ),
    ] = None,
    rank: RankOption = None,
    which: WhichOption = None,
) -> None:
    """Show what happened in a run: counts, incidents by kind, what led to what."""
    from stepguard.report.run_markdown import render_markdown
    from stepguard.report.summary import render_json, summarize

    _refuse_contradictions(as_json, markdown, html, out)
    if html:
        write_page(report_page(run, rank), out or folder_of(run) / PAGE)
        return
    story = open_story(run, rank)
    summary = summarize(chosen(story, which), story)
    if as_json:
        echo(render_json(summary))
    elif markdown is None:
        _show(summary)
    elif str(markdown) == "-":
        echo(render_markdown(summary), nl=False)
    else:
        _write(markdown, render_markdown(summary))


def _refuse_contradictions(
    as_json: bool, markdown: Path | None, html: bool, out: Path | None
) -> None:
    if as_json and markdown is not None:
        raise ConfigError("--json and --markdown exclude each other; give one of them.")
    if html and (as_json or markdown is not None):
        raise ConfigError("--html excludes --json and --markdown; give one of them.")
    if out is not None and not html:
        raise ConfigError("--out says where the page of --html goes; give both.")


def _show(summary: RunSummary) -> None:
    from stepguard.report import screen
    from stepguard.report.run_terminal import render_terminal

    out = sys.stdout
    text = render_terminal(
        summary,
        width=screen.columns(out),
        colour=screen.wants_colour(out),
        unicode=screen.takes_unicode(out),
    )
    screen.put(text, out)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown: {path} cannot be written: {error.strerror}.") from error
    echo(f"wrote {path}")

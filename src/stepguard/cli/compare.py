"""`stepguard compare RUN_A RUN_B`: two runs side by side, from their journals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._results import (
    COMPARISON,
    RankOption,
    comparison_page,
    echo,
    folder_of,
    open_run,
    write_page,
)


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="RUN_A", help="A run directory or journal, such as the original."),
    ],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="The one to compare it with.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    html: Annotated[
        bool, typer.Option("--html", help="Write both runs to one web page that opens from disk.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="With --html: where to; - is stdout. Default: compare.html in RUN_B.",
        ),
    ] = None,
    rank: RankOption = None,
) -> None:
    """Put two runs side by side: bad steps, what was done, causes, losses, settings that differ."""
    from stepguard.report import screen
    from stepguard.report.compare import compare as put_side_by_side
    from stepguard.report.compare import render_json, render_terminal

    if html and as_json:
        raise ConfigError("--html and --json exclude each other; give one of them.")
    if out is not None and not html:
        raise ConfigError("--out says where the page of --html goes; give both.")
    comparison = put_side_by_side(open_run(first, rank), open_run(second, rank))
    if html:
        page = comparison_page((first, second), rank, comparison)
        write_page(page, out or folder_of(second) / COMPARISON)
        return
    if as_json:
        echo(render_json(comparison))
        return
    stream = sys.stdout
    width = screen.columns(stream)
    text = render_terminal(comparison, width=width, colour=screen.wants_colour(stream))
    screen.put(text, stream)

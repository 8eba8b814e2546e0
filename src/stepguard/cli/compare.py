"""`stepguard compare RUN_A RUN_B`: two runs side by side, from their journals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepguard.cli._run_folder import RankOption, open_run


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="RUN_A", help="A run directory or journal, such as the original."),
    ],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="The one to compare it with.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
    rank: RankOption = None,
) -> None:
    """Put two runs side by side: bad steps, what was done, causes, losses, settings that differ."""
    from stepguard.report import screen
    from stepguard.report.compare import compare as put_side_by_side
    from stepguard.report.compare import render_json, render_terminal

    comparison = put_side_by_side(open_run(first, rank), open_run(second, rank))
    if as_json:
        typer.echo(render_json(comparison))
        return
    out = sys.stdout
    width = screen.columns(out)
    text = render_terminal(comparison, width=width, colour=screen.wants_colour(out))
    screen.put(text, out)

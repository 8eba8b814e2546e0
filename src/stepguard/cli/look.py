"""`stepguard look RUN`: the deep looks of a run, worst first."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._run_folder import RankOption, RunArgument, WhichOption, open_run
from stepguard.cli._terminal import echo


def look(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="Every look as one JSON line instead of tables.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every row instead of the worst ones.")
    ] = False,
    which: WhichOption = None,
    rank: RankOption = None,
) -> None:
    """Show how far the numbers of a run are from their limits, from its deep looks."""
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import looks, screen

    opened = open_run(run, rank, which)
    found = opened.looks
    if not found:
        raise ConfigError(f"{run} holds no deep looks: {looks.why_none(opened)}.")
    if as_json:
        for one in found:
            echo(dumps(to_plain(one)))
        return
    most = None if everything else looks.MOST_LISTED
    out = sys.stdout
    screen.put(screen.draw(out, lambda console: looks.paint(found, console, most=most)), out)

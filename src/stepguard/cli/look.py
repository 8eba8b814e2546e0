"""`stepguard look RUN`: the deep looks of a run, worst first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._run_folder import RankOption, open_run


def look(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its journal.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Every look as one JSON line instead of tables.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every row instead of the worst ones.")
    ] = False,
    rank: RankOption = 0,
) -> None:
    """Show how far the numbers of a run are from their limits, from its deep looks."""
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import looks, screen

    found = open_run(run, rank).looks
    if not found:
        raise ConfigError(
            f"{run} holds no deep looks: GuardConfig(look_every=None), compiled or sharded models, "
            "and runs of earlier versions have none."
        )
    if as_json:
        for one in found:
            typer.echo(dumps(to_plain(one)))
        return
    most = None if everything else looks.MOST_LISTED
    out = sys.stdout
    screen.put(screen.draw(out, lambda console: looks.paint(found, console, most=most)), out)

"""`stepguard serve RUNS`: the page of a run, or of a folder of runs, while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepguard.cli._terminal import echo


def serve(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A run directory, or a folder with several.")
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where to bind, 127.0.0.1 by default. Beyond the loopback, and where other people "
            "use this machine, a token is needed; one is made where none is given.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="Default: the first free one from 8321."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="STEPGUARD_TOKEN",
            metavar="TEXT",
            help="Ask for this token; also by the variable STEPGUARD_TOKEN.",
        ),
    ] = None,
) -> None:
    """Show runs live in the browser, from their journals; training is not touched."""
    from stepguard.serve.server import serve_runs

    serve_runs(runs, host, port, token, say=echo)

"""`stepguard whatif RUN_OR_CAPSULE`: which change would have kept the bad value away."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from stepguard._errors import EXIT_OK, EXIT_SCRIPT_FAILED, ConfigError
from stepguard.cli._terminal import YesOption, confirm_code, echo


def whatif(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CAPSULE",
            help="Folder `incidents/<id>/capsule` of a run, or the run: its last incident, or the "
            "first of several in a row.",
        ),
    ],
    own: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="MODULE:FUNCTION",
            help="A fix of your own: function(model, optimizer), which may return a loss function.",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Script to take model, optimizer and loss from."),
    ] = None,
    build: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function that returns (model, optimizer, loss_fn)."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the losses of every candidate to this file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the candidates as strict JSON.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Train the steps before an incident again, once for each thing that might have helped.

    Exit code 1 when nothing does. This runs your training script, or the function given by --build.
    For a capsule that was made elsewhere, the command it names is printed and confirmed first.
    """
    from stepguard.records.codec import dumps, to_plain
    from stepguard.report import whatif as table
    from stepguard.run.whatif import whatif as try_all

    for name, given in (("--with", own), ("--build", build)):
        if given is not None and given.count(":") != 1:
            raise ConfigError(f"{name} {given!r} must look like 'package.module:function'.")
    # What the script prints must not mix with the table or the JSON on stdout.
    with redirect_stdout(sys.stderr), table.progress_bar(sys.stderr) as progress:
        found = try_all(
            path,
            build=build,
            script=script,
            own=own,
            progress=progress,
            confirm=confirm_code(yes),
        )
    if plot is not None:
        from stepguard.report.whatif_png import write_png

        try:
            write_png(found, plot)
        except OSError as error:
            raise ConfigError(f"{plot} cannot be written: {error.strerror}.") from error
        echo(f"wrote {plot}", err=True)
    if as_json:
        echo(dumps(to_plain(found)))
    else:
        table.show(found, sys.stdout)
    raise typer.Exit(EXIT_OK if found.best is not None else EXIT_SCRIPT_FAILED)

"""`stepguard replay CAPSULE`: run a bad step again and print where its first harmful value is born."""

from __future__ import annotations

from typing import Annotated

import typer

from stepguard._errors import EXIT_OK, EXIT_SCRIPT_FAILED


def replay(
    capsule: Annotated[str, typer.Argument(help="Folder `incidents/<id>/capsule` of a run.")],
    script: Annotated[str | None, typer.Option(help="Script to take model, optimizer and loss from.")] = None,
    build: Annotated[
        str | None, typer.Option(help="`module:function` that returns (model, optimizer, loss_fn).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the incident as strict JSON.")] = False,
) -> None:
    """Run a bad step again, here, and name its origin. Exit code 1 when it does not reproduce."""
    from stepguard.records.codec import dumps, to_plain
    from stepguard.replaying import replay as run_again
    from stepguard.report.terminal import Terminal

    incident = run_again(capsule, script=script, build=build)
    if as_json:
        typer.echo(dumps(to_plain(incident)))
    else:
        Terminal().incident(incident)
    reproduced = incident.origin is not None and bool(incident.origin.reproduced)
    if not reproduced and not as_json:
        typer.echo("stepguard: not reproduced: the same step is finite here.", err=True)
    raise typer.Exit(EXIT_OK if reproduced else EXIT_SCRIPT_FAILED)

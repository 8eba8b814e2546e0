"""`stepguard replay CAPSULE`: run a bad step again and print its origin."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_OK, EXIT_SCRIPT_FAILED, ConfigError
from stepguard.cli._terminal import YesOption, confirm_code, echo

if TYPE_CHECKING:
    from stepguard.records import Incident
    from stepguard.state.step import Step


def replay(
    capsule: Annotated[
        str, typer.Argument(metavar="CAPSULE", help="Folder `incidents/<id>/capsule` of a run.")
    ],
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the incident as strict JSON.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger where the value originates.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Run a bad step again, here, and name its origin. Exit code 1 when it does not reproduce.

    This runs your training script, or the function given by --build. For a capsule that was made
    elsewhere, the command it names is printed and confirmed first.
    """
    from stepguard.records.codec import dumps, to_plain
    from stepguard.run.replay import replay as run_again

    if build is not None and build.count(":") != 1:
        raise ConfigError(f"--build {build!r} must look like 'package.module:function'.")
    if as_json and debug:
        raise ConfigError(
            "--json and --pdb exclude each other: one prints for a program, the other talks to you."
        )
    if as_json:
        # What the script prints must not mix with the JSON on stdout.
        with redirect_stdout(sys.stderr):
            incident = run_again(capsule, script=script, build=build, confirm=confirm_code(yes))
        echo(dumps(to_plain(incident)))
    else:
        show = partial(_show, debug=debug)
        incident = run_again(
            capsule, script=script, build=build, inspect=show, confirm=confirm_code(yes)
        )
    if incident.origin is not None and incident.origin.reproduced:
        raise typer.Exit(EXIT_OK)
    if not as_json:
        _tell_not_reproduced(capsule, incident)
    raise typer.Exit(EXIT_SCRIPT_FAILED)


def _show(step: Step, incident: Incident, *, debug: bool) -> None:
    """Print, and enter the debugger, while the script's objects are alive."""
    from stepguard.report.terminal import Terminal

    Terminal(sys.stdout).incident(incident)
    if debug:
        _enter_debugger(step, incident)


def _enter_debugger(step: Step, incident: Incident) -> None:
    import pdb  # noqa: T100

    from stepguard.locate.stop_at_origin import frames_at_origin

    trace = frames_at_origin(step, incident.reading)
    if trace is None:
        echo(
            "stepguard: no line of yours is involved where the value is born, so there is no frame "
            "to stop in."
        )
        return
    echo("stepguard: the operation above has just run; `up` leads to its callers, `c` or `q` ends.")
    debugger = pdb.Pdb()
    debugger.reset()
    debugger.interaction(None, trace)


def _tell_not_reproduced(capsule: str, incident: Incident) -> None:
    from stepguard.state.capsule import read_capsule

    departs = incident.origin.evidence.departs if incident.origin is not None else None
    why = departs or "the same step is finite here"
    echo(f"stepguard: not reproduced: {why.removesuffix('.')}.", err=True)
    for difference in read_capsule(Path(capsule)).differences():
        echo(f"stepguard: {difference}", err=True)

"""`stepguard fix RUN_OR_CAPSULE`: the change of your code that mends a bad step, as a diff."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from stepguard._errors import ConfigError
from stepguard.cli._terminal import YesOption, confirm_code, echo


def fix(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CAPSULE",
            help="Folder `incidents/<id>/capsule` of a run, or the run: its last incident, or the "
            "first of several in a row.",
        ),
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
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the change to the files it is for.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the change and its proof as strict JSON.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Print the change of your code that mends a bad step, as a diff that the step was run with.

    The step is run again as it was and with the change; nothing is written without --apply. Exit
    code 2 when no change of your own lines is known to mend it. This runs your training script, or
    the function given by --build. For a capsule that was made elsewhere, the command it names is
    printed and confirmed first.
    """
    from stepguard.records.codec import dumps
    from stepguard.run.fix import fix as find_fix

    if build is not None and build.count(":") != 1:
        raise ConfigError(f"--build {build!r} must look like 'package.module:function'.")
    # What the script prints must not mix with the diff or the JSON on stdout.
    with redirect_stdout(sys.stderr):
        found = find_fix(path, build=build, script=script, confirm=confirm_code(yes))
    diff = found.diff
    written = [str(file) for file in found.apply()] if apply else []
    incident = found.incident
    after = found.remedy.loss
    if as_json:
        facts = {
            "step": incident.step,
            "code": found.code,
            "source": incident.origin.source if incident.origin is not None else None,
            "title": found.remedy.title,
            "before": {"summary": incident.verdict.summary, "loss": incident.reading.loss},
            "after": {"summary": found.remedy.tried, "loss": after},
            "diff": diff,
            "applied": written,
        }
        echo(dumps(facts))
        return
    echo(diff, nl=False)
    told = "" if after is None else f" (loss {after:.4g})"
    echo(f"stepguard: {found.code}: {found.remedy.title}", err=True)
    echo(f"stepguard: before, step {incident.step}: {incident.verdict.summary}", err=True)
    echo(f"stepguard: after, {found.remedy.tried}{told}", err=True)
    for file in written:
        echo(f"stepguard: wrote {file}", err=True)
    if not written:
        echo("stepguard: nothing is written; --apply writes it", err=True)

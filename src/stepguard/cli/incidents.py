"""`stepguard replay CAPSULE`: run a bad step again and print its origin."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_OK, EXIT_SCRIPT_FAILED, ConfigError
from stepguard.cli._results import YesOption, confirm_code, echo

if TYPE_CHECKING:
    from stepguard.records import Incident
    from stepguard.state.batch import Step
import json as json_module
from dataclasses import asdict

from stepguard._errors import EXIT_USAGE
from stepguard.diagnose.engine import UnknownCode, all_rules, index, page, rule_of
from stepguard.diagnose.rule import Rule

# --- `stepguard replay CAPSULE`: run a bad step again and print its origin.


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

    from stepguard.locate.find_origin import frames_at_origin

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


# --- `stepguard whatif RUN_OR_CAPSULE`: which change would have kept the bad value away.


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
    from stepguard.report import probes as table
    from stepguard.run.replay import whatif as try_all

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
        from stepguard.report.plot import write_trials_png

        try:
            write_trials_png(found, plot)
        except OSError as error:
            raise ConfigError(f"{plot} cannot be written: {error.strerror}.") from error
        echo(f"wrote {plot}", err=True)
    if as_json:
        echo(dumps(to_plain(found)))
    else:
        table.show(found, sys.stdout)
    raise typer.Exit(EXIT_OK if found.best is not None else EXIT_SCRIPT_FAILED)


# --- `stepguard fix RUN_OR_CAPSULE`: the change of your code that mends a bad step, as a diff.


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
    from stepguard.run.replay import fix as find_fix

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


# --- `stepguard explain SG204`: the page of a finding, without importing torch.


def explain(
    code: Annotated[
        str, typer.Argument(help="A code such as SG204; without one, all codes are listed.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Explain a finding: what it means, why it happens, how stepguard knows, what to do."""
    try:
        rules = (rule_of(code),) if code else all_rules()
    except UnknownCode as unknown:
        echo(str(unknown), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    if json:
        listed = [as_plain(rule) for rule in rules]
        printed = listed[0] if code else listed
        echo(json_module.dumps(printed, indent=2, ensure_ascii=False))
    else:
        _print(page(rules[0]) if code else index())


def as_plain(rule: Rule) -> dict[str, object]:
    """A rule as JSON values."""
    text = rule.text
    return {
        "code": rule.code,
        "title": text.title,
        "what": text.what,
        "why": text.why,
        "how": text.how,
        "setup": text.setup,
        "bad": text.bad,
        "fixed": rule.fixed,
        "remedies": [asdict(remedy) for remedy in rule.ordered],
        "see": list(text.see),
    }


def _print(markdown: str) -> None:
    """Print rendered Markdown on a terminal, plain text in a pipe."""
    if not sys.stdout.isatty():
        echo(markdown, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(markdown))

"""Commands on one incident: `replay`, `whatif` and `fix` run it again, `explain` needs no run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepguard._errors import EXIT_OK, EXIT_SCRIPT_FAILED, EXIT_USAGE
from stepguard.cli._results import (
    JsonOption,
    echo,
    echo_json,
    exclude,
    refuse_no_function,
    writing,
)
from stepguard.diagnose.engine import UnknownCode, all_rules, index, page, rule_of
from stepguard.diagnose.rule import Rule

if TYPE_CHECKING:
    from stepguard.records import Incident
    from stepguard.state.batch import Step

CapsuleArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_CAPSULE",
        help="Folder `incidents/<id>/capsule` of a run, or the run: its last incident, or the "
        "first of several in a row.",
    ),
]
ScriptOption = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Script to take model, optimizer and loss from."),
]
BuildOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION", help="Function that returns (model, optimizer, loss_fn)."
    ),
]
YesOption = Annotated[
    bool,
    typer.Option(
        "--yes", help="Run what the capsule names without asking, whoever made the capsule."
    ),
]


def confirm_code(yes: bool) -> Callable[[str], bool]:
    """Print what a capsule of somebody else would run, and ask; no terminal means no."""

    def confirmed(command: str) -> bool:
        echo(
            "stepguard: this capsule was not made by you, on this machine, in this folder. "
            f"Replaying it runs: {command}",
            err=True,
        )
        return yes or (sys.stdin.isatty() and typer.confirm("Run it?", err=True))

    return confirmed


def replay(
    capsule: Annotated[
        str, typer.Argument(metavar="CAPSULE", help="Folder `incidents/<id>/capsule` of a run.")
    ],
    script: ScriptOption = None,
    build: BuildOption = None,
    as_json: JsonOption = False,
    debug: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger where the value originates.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Run a bad step again, here, and name its origin. Exit code 1 when it does not reproduce.

    This runs your training script, or the function given by --build. For a capsule that was made
    elsewhere, the command it names is printed and confirmed first.
    """
    from stepguard.run.replay import replay as run_again

    def inspect(step: Step, incident: Incident) -> None:
        """Print, and enter the debugger, while the script's objects are alive."""
        from stepguard.report.terminal import Terminal

        Terminal(sys.stdout).incident(incident)
        if debug:
            _enter_debugger(step, incident)

    refuse_no_function(build=build)
    exclude(json=as_json, pdb=debug)
    # What the script prints must not mix with the JSON on stdout.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        incident = run_again(
            capsule,
            script=script,
            build=build,
            inspect=None if as_json else inspect,
            confirm=confirm_code(yes),
        )
    if as_json:
        echo_json(incident)
    if incident.origin is not None and incident.origin.reproduced:
        raise typer.Exit(EXIT_OK)
    if not as_json:
        from stepguard.state.capsule import read_capsule

        departs = incident.origin.evidence.departs if incident.origin is not None else None
        why = departs or "the same step is finite here"
        echo(f"stepguard: not reproduced: {why.removesuffix('.')}.", err=True)
        for difference in read_capsule(Path(capsule)).differences():
            echo(f"stepguard: {difference}", err=True)
    raise typer.Exit(EXIT_SCRIPT_FAILED)


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


def whatif(
    path: CapsuleArgument,
    own: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="MODULE:FUNCTION",
            help="A fix of your own: function(model, optimizer), which may return a loss function.",
        ),
    ] = None,
    script: ScriptOption = None,
    build: BuildOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the losses of every candidate to this file."),
    ] = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
) -> None:
    """Train the steps before an incident again, once for each thing that might have helped.

    Exit code 1 when nothing does. This runs your training script, or the function given by --build.
    For a capsule that was made elsewhere, the command it names is printed and confirmed first.
    """
    from stepguard.report import probes as table
    from stepguard.run.replay import whatif as try_all

    refuse_no_function(build=build, **{"with": own})
    # What the script prints must not mix with the table or the JSON on stdout.
    with redirect_stdout(sys.stderr), table.progress_bar(sys.stderr) as progress:
        found = try_all(
            path, build=build, script=script, own=own, progress=progress, confirm=confirm_code(yes)
        )
    if plot is not None:
        from stepguard.report.plot import write_trials_png

        with writing(plot, err=True):
            write_trials_png(found, plot)
    if as_json:
        echo_json(found)
    else:
        table.show(found, sys.stdout)
    raise typer.Exit(EXIT_OK if found.best is not None else EXIT_SCRIPT_FAILED)


def fix(
    path: CapsuleArgument,
    script: ScriptOption = None,
    build: BuildOption = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the change to the files it is for.")
    ] = False,
    as_json: JsonOption = False,
    yes: YesOption = False,
) -> None:
    """Print the change of your code that mends a bad step, as a diff that the step was run with.

    The step is run again as it was and with the change; nothing is written without --apply. Exit
    code 2 when no change of your own lines is known to mend it. This runs your training script, or
    the function given by --build. For a capsule that was made elsewhere, the command it names is
    printed and confirmed first.
    """
    from stepguard.run.replay import fix as find_fix

    refuse_no_function(build=build)
    # What the script prints must not mix with the diff or the JSON on stdout.
    with redirect_stdout(sys.stderr):
        found = find_fix(path, build=build, script=script, confirm=confirm_code(yes))
    diff = found.diff
    written: list[str] = []
    if apply:
        written = list(map(str, found.apply()))
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
        echo_json(facts)
        return
    echo(diff, nl=False)
    tried = found.remedy.tried
    if after is not None:
        tried += f" (loss {after:.4g})"
    echo(f"stepguard: {found.code}: {found.remedy.title}", err=True)
    echo(f"stepguard: before, step {incident.step}: {incident.verdict.summary}", err=True)
    echo(f"stepguard: after, {tried}", err=True)
    for file in written:
        echo(f"stepguard: wrote {file}", err=True)
    if not written:
        echo("stepguard: nothing is written; --apply writes it", err=True)


def explain(
    code: Annotated[
        str, typer.Argument(help="A code such as SG204; without one, all codes are listed.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Explain a finding: what it means, why it happens, how stepguard knows, what to do."""
    if code:
        try:
            rule = rule_of(code)
        except UnknownCode as unknown:
            echo(str(unknown), err=True)
            raise typer.Exit(EXIT_USAGE) from None
        facts: object = _as_plain(rule)
        markdown = page(rule)
    else:
        facts = list(map(_as_plain, all_rules()))
        markdown = index()
    if as_json:
        echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    if not sys.stdout.isatty():
        echo(markdown, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(markdown))


def _as_plain(rule: Rule) -> dict[str, object]:
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

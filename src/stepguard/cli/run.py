"""Commands that run your code: `run` a script, and `replay`, `whatif` and `fix` a bad step."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepguard._errors import EXIT_OK, EXIT_SCRIPT_FAILED, ConfigError
from stepguard.cli._results import (
    BuildOption,
    JsonOption,
    ScriptOption,
    echo,
    echo_json,
    exclude,
    refuse_no_function,
    writing,
)

if TYPE_CHECKING:
    from stepguard.records import Incident, Origin
    from stepguard.state.batch import Step

VARIABLE = "STEPGUARD_CONFIG"
SETTINGS = (".toml", ".yaml", ".yml", ".json")
WEBHOOK = "STEPGUARD_WEBHOOK"
OPTIONS = ("--run-dir", "--human-log", "--config", "--restore", "--webhook", "-m")


def run(
    context: typer.Context,
    script: str = typer.Argument(
        "", help="The training script; everything after it goes to the script."
    ),
    module: bool = typer.Option(
        False, "--module", "-m", help="SCRIPT is a module, as in `python -m`."
    ),
    run_dir: str | None = typer.Option(
        None,
        "--run-dir",
        metavar="DIR",
        help="Folder for journal, incidents and checkpoints. By default a journal is kept in "
        ".stepguard/SCRIPT-TIME; `none` writes nothing.",
    ),
    human_log: str | None = typer.Option(
        None, "--human-log", metavar="DIR", help="Folder for a readable latest.log."
    ),
    config: Path | None = typer.Option(  # noqa: B008 (typer reads the default)
        None,
        "--config",
        envvar=VARIABLE,
        metavar="FILE",
        help="Fields of GuardConfig, and of Policy below `policy`: TOML, YAML or JSON.",
    ),
    restore: str | None = typer.Option(
        None,
        "--restore",
        metavar="WHICH",
        help="Resume from a checkpoint of the run folder: last-good, newest, auto (last-good if "
        "there is one) or a path.",
    ),
    webhook: str | None = typer.Option(
        None,
        "--webhook",
        envvar=WEBHOOK,
        show_envvar=True,
        metavar="URL",
        help="Post incidents and stops to this URL, in Slack's format.",
    ),
) -> None:
    """Run a training script under the guard, without changing it.

    Also under torchrun: torchrun -m stepguard run train.py.
    """
    _refuse_no_script(script, context, module=module)
    given: dict[str, Any] = {}
    kept = None if run_dir == "none" else run_dir
    folders = {
        name: folder for name, folder in (("run_dir", kept), ("human_log", human_log)) if folder
    }
    for name, folder in folders.items():
        if Path(folder).is_file():
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {folder} is a file; give a folder, which may be new.")
        # Absolute: the script may change the current directory.
        given[name] = str(Path(folder).resolve())
    if webhook:
        from stepguard.report.sinks import WebhookSink

        given["sinks"] = (WebhookSink(webhook, name=Path(script).name),)
    from stepguard.records import GuardConfig
    from stepguard.run.guarded_script import run_script, start_from, with_journal

    if config is None:
        settings = GuardConfig(**given)
    else:
        try:
            settings = GuardConfig.from_file(config, **given)
        except ConfigError as error:
            # By its name: newer releases of typer bring a click of their own.
            source = getattr(context.get_parameter_source("config"), "name", "")
            where = VARIABLE if source == "ENVIRONMENT" else "--config"
            raise ConfigError(f"{where} {error}") from None
    if settings.run_dir is None and run_dir is None and restore is None:
        settings = with_journal(settings, script)
    resume = None if restore is None else start_from(restore, settings)
    raise typer.Exit(
        run_script(
            script, list(context.args), settings, module=module, restore=resume, ours=OPTIONS
        )
    )


def _refuse_no_script(script: str, context: typer.Context, *, module: bool) -> None:
    """Say what is wrong with the word in the place of the script."""
    path = Path(script)
    wrong = ""
    if not script:
        wrong = (
            "no script is given. Write: stepguard run [options] train.py [options of the script]."
        )
        for name, value in context.params.items():
            if str(value).endswith(".py"):
                option = name.replace("_", "-")
                wrong = (
                    f"no script is given: --{option} took {value} as its value. Give the "
                    "option a value, then the script."
                )
    elif script.startswith("-"):
        wrong = (
            f"{script} is not an option of `stepguard run`; give its options before the script "
            f"({', '.join(OPTIONS)}), the script's after it. A policy is set in a file: "
            "--config FILE.toml."
        )
    elif module:
        if path.is_file() and path.suffix == ".py":
            wrong = f"{script} is a file; remove -m, or give the name of a module."
    elif path.is_dir():
        wrong = f"{script} is a folder; give the Python script in it, or a package with -m."
    elif path.suffix.lower() in SETTINGS:
        wrong = f"{script} is not a script; settings go before it: --config {script}."
    elif not path.is_file():
        wrong = f"{script} does not exist; give the path of a Python script."
        if context.args and context.args[0].endswith(".py"):
            wrong = f"{script} does not exist; write: stepguard run {context.args[0]}."
    if wrong:
        raise ConfigError(wrong)


# --- A bad step again.


CapsuleArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_CAPSULE",
        help="A run directory, for its newest capsule; or the folder of one incident.",
    ),
]
ChainArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_CAPSULE",
        help="A run directory, for its last incident (the first of several in a row); or the "
        "folder of one incident.",
    ),
]
YesOption = Annotated[
    bool,
    typer.Option(
        "--yes", help="Run the code that the capsule names without asking, whatever its origin."
    ),
]


def _confirm_code(yes: bool) -> Callable[[str], bool]:
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
    path: CapsuleArgument,
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
    from stepguard.run.replay import newest_capsule
    from stepguard.run.replay import replay as run_again

    def inspect(step: Step, incident: Incident) -> None:
        """Print, and enter the debugger, while the script's objects are alive."""
        from stepguard.report.terminal import Terminal

        Terminal(sys.stdout).incident(incident)
        if debug:
            _enter_debugger(step, incident)

    refuse_no_function(build=build)
    exclude(json=as_json, pdb=debug)
    capsule, held = newest_capsule(Path(path))
    if held:
        which = f"the newest of {held} capsules" if held > 1 else "the only capsule"
        another = f"stepguard replay {shlex.quote(str(capsule.parent.parent))}/ID"
        echo(f"stepguard: replaying {capsule.parent}, {which}; another one: {another}", err=True)
    # What the script prints must not mix with the JSON on stdout.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        incident = run_again(
            capsule,
            script=script,
            build=build,
            inspect=None if as_json else inspect,
            confirm=_confirm_code(yes),
        )
    if as_json:
        echo_json(incident)
    if incident.origin is not None and incident.origin.reproduced:
        raise typer.Exit(EXIT_OK)
    if not as_json:
        _tell_difference(capsule, incident.origin)
    raise typer.Exit(EXIT_SCRIPT_FAILED)


def _tell_difference(capsule: Path, origin: Origin | None) -> None:
    """Say why a step is not reproduced, and what is different here."""
    from stepguard.state.capsule import read_capsule

    why = origin.evidence.departs if origin is not None else None
    if why is None and origin is not None and origin.reproduced is None and origin.remarks:
        why = f"the step is finite here; {origin.remarks[-1]}"
    why = why or "the same step is finite here"
    echo(f"stepguard: not reproduced: {why.removesuffix('.')}.", err=True)
    for difference in read_capsule(capsule).differences():
        echo(f"stepguard: {difference}", err=True)


def _enter_debugger(step: Step, incident: Incident) -> None:
    import pdb  # noqa: T100

    from stepguard.locate.find_origin import frames_at_origin

    trace = frames_at_origin(step, incident.reading)
    if trace is None:
        echo(
            "stepguard: no line of yours is involved where the value originates, so there is no "
            "frame to stop in."
        )
        return
    echo("stepguard: the operation above has just run; `up` leads to its callers, `c` or `q` ends.")
    debugger = pdb.Pdb()
    debugger.reset()
    debugger.interaction(None, trace)


def whatif(
    path: ChainArgument,
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
            path, build=build, script=script, own=own, progress=progress, confirm=_confirm_code(yes)
        )
    if as_json:
        echo_json(found)
    else:
        table.show(found, sys.stdout)
    raise typer.Exit(EXIT_OK if found.best is not None else EXIT_SCRIPT_FAILED)


def fix(
    path: ChainArgument,
    script: ScriptOption = None,
    build: BuildOption = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the change to the files it is for.")
    ] = False,
    as_json: JsonOption = False,
    yes: YesOption = False,
) -> None:
    """Print the change of your code that fixes a bad step, as a diff that the step was run with.

    The step is replayed as it was and with the change; nothing is written without --apply. Exit
    code 2 when no change of your code is known to fix it. This runs your training script, or
    the function given by --build. For a capsule that was made elsewhere, the command it names is
    printed and confirmed first.
    """
    from stepguard.cli.schemas import Fixed, Tried
    from stepguard.run.replay import fix as find_fix

    refuse_no_function(build=build)
    # What the script prints must not mix with the diff or the JSON on stdout.
    with redirect_stdout(sys.stderr):
        found = find_fix(path, build=build, script=script, confirm=_confirm_code(yes))
    written = tuple(map(str, found.apply())) if apply else ()
    incident, tried, after = found.incident, found.remedy.tried, found.remedy.loss
    if as_json:
        facts = Fixed(
            step=incident.step,
            code=found.code,
            source=incident.origin.source if incident.origin is not None else None,
            title=found.remedy.title,
            before=Tried(summary=incident.verdict.summary, loss=incident.reading.loss),
            after=Tried(summary=tried, loss=after),
            diff=found.diff,
            applied=written,
        )
        echo_json(facts)
        return
    echo(found.diff, nl=False)
    if after is not None:
        tried += f" (loss {after:.4g})"
    echo(f"stepguard: {found.code}: {found.remedy.title}", err=True)
    echo(f"stepguard: before, step {incident.step}: {incident.verdict.summary}", err=True)
    echo(f"stepguard: after, {tried}", err=True)
    for file in written:
        echo(f"stepguard: wrote {file}", err=True)
    if not written:
        echo("stepguard: nothing is written; --apply writes it", err=True)


# --- Two runs of one step beside each other.


def diff(
    one: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CAPSULE",
            help="A run directory, for its newest capsule; the folder of one incident; or a log "
            "written by --save or by torch's DebugMode.save_logs.",
        ),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="What to compare it with: as above.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="SETTING",
            help="Instead of OTHER: the same step with dtype=float64, threads=1, split=2, "
            "sdpa=math, compile=off, deterministic=on or optimizer=plain.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write the operations, to compare another version with."
        ),
    ] = None,
    script: ScriptOption = None,
    build: BuildOption = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
) -> None:
    """Find the first operation whose values differ between two runs of a step. Exit code 1 if any.

    Two capsules (runs, ranks), one capsule under another setting, or logs of two versions of your
    code or of torch's DebugMode. For a capsule this runs your training script, or the function
    given by --build. For one that was made elsewhere, the command it names is printed and
    confirmed first.
    """
    from stepguard.locate.operation_log import compare
    from stepguard.run import difference

    refuse_no_function(build=build)
    changed = difference.parse_settings(settings or ())
    if bool(changed) == bool(other) and not (save and not other):
        raise ConfigError(
            "give either OTHER or --with SETTING, to compare with; or --save FILE.json."
        )
    code = difference.Code(build, script, _confirm_code(yes))
    # What the script prints must not mix with the result on stdout.
    with redirect_stdout(sys.stderr):
        if changed:
            log, against = difference.under_settings(Path(one), changed, code)
        else:
            log = difference.log_of(Path(one), code)
            against = log if other is None else difference.log_of(Path(other), code)
    if save is not None:
        with writing(save, err=True):
            difference.write_log(log, save)
        if against is log:
            return
    found = compare(log, against)
    if as_json:
        echo_json(found)
    else:
        echo("\n".join(difference.spelled(found)))
    raise typer.Exit(EXIT_OK if found.same else EXIT_SCRIPT_FAILED)

"""`stepguard run SCRIPT`: guard an unmodified script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stepguard._errors import ConfigError

if TYPE_CHECKING:
    from stepguard.records import GuardConfig

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
        help="Folder for journal, incidents and checkpoints; none by default.",
    ),
    human_log: str | None = typer.Option(
        None, "--human-log", metavar="DIR", help="Folder for a readable latest.log."
    ),
    config: Path | None = typer.Option(  # noqa: B008 (typer reads the default)
        None,
        "--config",
        envvar=VARIABLE,
        metavar="FILE",
        help="Fields of GuardConfig, and of Policy below `policy`: TOML, YAML or JSON. Also by "
        "the variable STEPGUARD_CONFIG.",
    ),
    restore: str | None = typer.Option(
        None,
        "--restore",
        metavar="WHICH",
        help="Go on from a checkpoint of the run folder: last-good, newest, auto (last-good if "
        "there is one) or a path.",
    ),
    webhook: str | None = typer.Option(
        None,
        "--webhook",
        envvar=WEBHOOK,
        show_envvar=True,
        metavar="URL",
        help="Post incidents and a stop there, as Slack takes them.",
    ),
) -> None:
    """Run a training script under the guard, without changing it.

    Also under torchrun: torchrun -m stepguard run train.py.
    """
    _refuse_no_script(script, context, module=module)
    given: dict[str, Any] = {}
    for name, folder in (("run_dir", run_dir), ("human_log", human_log)):
        if folder and Path(folder).is_file():
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {folder} is a file; give a folder, which may be new.")
        if folder:
            # Absolute: the script may change the current directory.
            given[name] = str(Path(folder).resolve())
    if webhook:
        from stepguard.report.sinks import WebhookSink

        given["sinks"] = (WebhookSink(webhook, name=Path(script).name),)
    settings = _settings(context, config, given)
    from stepguard.run.guarded_script import run_script, start_from

    resume = None if restore is None else start_from(restore, settings)
    raise typer.Exit(
        run_script(
            script, list(context.args), settings, module=module, restore=resume, ours=OPTIONS
        )
    )


def _settings(context: typer.Context, file: Path | None, given: dict[str, Any]) -> GuardConfig:
    from stepguard.records import GuardConfig

    if file is None:
        return GuardConfig(**given)
    try:
        return GuardConfig.from_file(file, **given)
    except ConfigError as error:
        # By its name: newer releases of typer bring a click of their own.
        source = context.get_parameter_source("config")
        by_variable = source is not None and source.name == "ENVIRONMENT"
        raise ConfigError(f"{VARIABLE if by_variable else '--config'} {error}") from None


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
                    f"no script is given. --{option} has taken {value} for its value; give it one, "
                    "then the script."
                )
    elif script.startswith("-"):
        wrong = (
            f"{script} is not an option of `stepguard run`; its own stand before the script "
            f"({', '.join(OPTIONS)}), those of the script after it. A policy is set in a file: "
            "--config FILE.toml."
        )
    elif module:
        if path.is_file() and path.suffix == ".py":
            wrong = f"{script} is a file; leave -m out, or give the name of a module."
    elif path.is_dir():
        wrong = f"{script} is a folder; give the Python script in it, or a package by -m."
    elif path.suffix.lower() in SETTINGS:
        wrong = f"{script} is not a script; settings go before it: --config {script}."
    elif not path.is_file():
        wrong = f"{script} does not exist; give the path of a Python script."
        if context.args and context.args[0].endswith(".py"):
            wrong = f"{script} does not exist; leave it out: stepguard run {context.args[0]}."
    if wrong:
        raise ConfigError(wrong)

"""`stepguard run SCRIPT`: guard an unmodified script."""

from __future__ import annotations

from pathlib import Path

import typer

from stepguard._errors import ConfigError


def run(
    context: typer.Context,
    script: str = typer.Argument(
        help="The training script; everything after it goes to the script."
    ),
    module: bool = typer.Option(
        False, "--module", "-m", help="SCRIPT is a module, as in `python -m`."
    ),
    run_dir: str | None = typer.Option(
        None, "--run-dir", help="Folder for journal and incidents; none by default."
    ),
    human_log: str | None = typer.Option(
        None, "--human-log", help="Folder for a readable latest.log."
    ),
    config: Path | None = typer.Option(  # noqa: B008 (typer reads the default)
        None,
        "--config",
        metavar="FILE.toml",
        help="Fields of GuardConfig, and of Policy below [policy].",
    ),
) -> None:
    """Run a training script under the guard, without changing it.

    Also under torchrun: torchrun -m stepguard run train.py.
    """
    if not module:
        _refuse_no_script(script)
    from stepguard.run.config_file import read_config
    from stepguard.run.guarded_script import run_script

    # Absolute paths: the script may change the current directory.
    folders = {}
    if run_dir:
        folders["run_dir"] = str(Path(run_dir).resolve())
    if human_log:
        folders["human_log"] = str(Path(human_log).resolve())
    settings = read_config(config, folders)
    raise typer.Exit(run_script(script, list(context.args), settings, module=module))


def _refuse_no_script(script: str) -> None:
    """Say what is wrong with the word in the place of the script."""
    path = Path(script)
    if path.is_file():
        return
    if script.startswith("-"):
        raise ConfigError(
            f"{script} is not an option of `stepguard run`; its own stand before the "
            "script (--run-dir, --human-log, --config, -m), those of the script after it. A policy "
            "is set in a file: --config FILE.toml."
        )
    if path.is_dir():
        raise ConfigError(
            f"{script} is a folder; give the Python script in it, or a package by -m."
        )
    raise ConfigError(f"{script} does not exist; give the path of a Python script.")

"""`stepguard run SCRIPT`: guard an unmodified script."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from stepguard._errors import EXIT_HALTED, EXIT_SCRIPT_FAILED, ConfigError, TrainingHalted

if TYPE_CHECKING:
    from stepguard.guard import Guard
    from stepguard.records import GuardConfig
    from stepguard.run.autoguard import Volunteers

EXIT_INTERRUPTED = 130
SWALLOWED = (0, EXIT_SCRIPT_FAILED)
"""Exit codes that a wrapper gives when it has caught the stop; any other one is the script's own
choice.
"""
_HERE = str(Path(__file__).parents[1])


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
    """Run a training script under the guard, without changing it (also: torchrun -m stepguard run
    train.py).
    """
    if not module:
        _refuse_no_script(script)
    from stepguard.run.config_file import read_config

    # absolute: the script may change the current directory
    folders = {
        name: str(Path(f).resolve())
        for name, f in (("run_dir", run_dir), ("human_log", human_log))
        if f
    }
    raise typer.Exit(
        run_script(script, list(context.args), read_config(config, folders), module=module)
    )


def _refuse_no_script(script: str) -> None:
    """Say what is wrong with the word in the place of the script."""
    path = Path(script)
    if path.is_file():
        return
    if script.startswith("-"):
        raise ConfigError(
            f"{script} is no option of `stepguard run`; its own stand before the script "
            f"(--run-dir, --human-log, "
            "--config, -m), those of the script after it. A policy is set in a file: --config "
            "FILE.toml."
        )
    if path.is_dir():
        raise ConfigError(
            f"{script} is a folder; give the Python script in it, or a package by -m."
        )
    raise ConfigError(f"{script} does not exist; give the path of a Python script.")


def run_script(
    script: str, arguments: list[str], config: GuardConfig, *, module: bool = False
) -> int:
    """Exit code: the script's own, 1 when it raised, 3 when the policy stopped it."""
    from stepguard.run.autoguard import Volunteers
    from stepguard.run.script import as_main

    _end_before_python()
    with Volunteers(config, _say) as volunteers, as_main(script, arguments, module=module) as start:
        code = _run(start, volunteers)
    if code in SWALLOWED and _halted(volunteers.guards):
        code = EXIT_HALTED
    _say_how_it_ended(volunteers, code)
    return code


def _end_before_python() -> None:
    """The threads of a process group must not outlive Python: one that still lets go of a tensor
    aborts the process.

    They end with their group, and that with the model in its wrapper, which is part of a cycle.
    Registered first, so called last: after what the script itself leaves for the end.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(gc.collect)


def _run(start: Callable[[], None], volunteers: Volunteers) -> int:
    try:
        start()
    except TrainingHalted:
        return EXIT_HALTED
    except SystemExit as ending:
        code = _exit_code(ending.code)
        return EXIT_HALTED if code == EXIT_SCRIPT_FAILED and _comes_from_a_stop(ending) else code
    except BaseException as fault:
        volunteers.ended_by(fault)
        _print_fault(fault)
        if _comes_from_a_stop(fault):
            return EXIT_HALTED
        return EXIT_INTERRUPTED if isinstance(fault, KeyboardInterrupt) else EXIT_SCRIPT_FAILED
    return 0


def _comes_from_a_stop(fault: BaseException) -> bool:
    """Did somebody catch TrainingHalted and leave with something else, as hydra does with
    `sys.exit(1)`?
    """
    seen: set[int] = set()
    found: BaseException | None = fault
    while found is not None and id(found) not in seen:
        if isinstance(found, TrainingHalted):
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False


def _halted(guards: list[Guard]) -> bool:
    """The script knows nothing of these guards, so whoever swallowed the stop did not mean to go on
    without it.
    """
    return any(guard.incidents and guard.incidents[-1].stopped for guard in guards)


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return EXIT_SCRIPT_FAILED


def _print_fault(fault: BaseException) -> None:
    """Only the user's frames: the runner's own say nothing about their bug. A hook of theirs goes
    first.
    """
    hook = getattr(
        sys.excepthook, "_previous", sys.excepthook
    )  # ours, of a stop, stands before theirs
    if hook is not sys.__excepthook__:
        hook(type(fault), fault, _without_runner(fault.__traceback__))
        return
    told = traceback.TracebackException.from_exception(fault)
    _keep_users_frames(told)
    print("".join(told.format()), end="", file=sys.stderr)


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _keep_users_frames(told: traceback.TracebackException) -> None:
    told.stack = traceback.StackSummary.from_list([f for f in told.stack if not _ours(f.filename)])
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if other is not None:
            _keep_users_frames(other)


def _ours(file: str) -> bool:
    return file.startswith((_HERE, "<frozen runpy>"))


def _say(text: str, whose: str = "") -> None:
    speaker = f"stepguard ({whose})" if whose else "stepguard"
    typer.echo(f"{speaker}: {text}", err=True)


def _say_how_it_ended(volunteers: Volunteers, code: int) -> None:
    if not volunteers.guards and code == 0:
        _say(_why_none(volunteers.refused))
    for guard in volunteers.guards:
        if guard.rank == 0:
            whose = guard.name if len(volunteers.guards) > 1 else ""
            _say(f"{guard.steps} steps guarded, {len(guard.incidents)} incidents.", whose)


def _why_none(refused: int) -> str:
    if refused:
        return "the run was not guarded: no optimizer of the script could be, for the reason above."
    return (
        "no optimizer was guarded: the script made none that stepped in this process, or guards "
        "its own."
    )

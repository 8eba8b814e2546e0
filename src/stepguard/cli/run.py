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

from stepguard._errors import EXIT_HALTED, EXIT_SCRIPT_FAILED, EXIT_USAGE, TrainingHalted

if TYPE_CHECKING:
    from stepguard.cli.volunteers import Volunteers
    from stepguard.guard import Guard
    from stepguard.records import GuardConfig

EXIT_INTERRUPTED = 130
_HERE = str(Path(__file__).parents[1])


def run(
    context: typer.Context,
    script: str = typer.Argument(help="The training script; everything after it goes to the script."),
    module: bool = typer.Option(False, "--module", "-m", help="SCRIPT is a module, as in `python -m`."),
    run_dir: str | None = typer.Option(None, "--run-dir", help="Folder for journal and incidents; none by default."),
    human_log: str | None = typer.Option(None, "--human-log", help="Folder for a readable latest.log."),
) -> None:
    """Run a training script under the guard, without changing it (also: torchrun -m stepguard run train.py)."""
    if not module and not Path(script).is_file():
        typer.echo(f"stepguard: error: {script} does not exist; give the path of a Python script.", err=True)
        raise typer.Exit(EXIT_USAGE)
    from stepguard.records import GuardConfig

    # absolute: the script may change the current directory
    folders = {name: str(Path(f).resolve()) for name, f in (("run_dir", run_dir), ("human_log", human_log)) if f}
    raise typer.Exit(run_script(script, list(context.args), GuardConfig(**folders), module=module))  # type: ignore[arg-type]


def run_script(script: str, arguments: list[str], config: GuardConfig, *, module: bool = False) -> int:
    """Exit code: the script's own, 1 when it raised, 3 when the policy stopped it."""
    from stepguard.cli.volunteers import Volunteers
    from stepguard.engine.script import as_main

    _end_before_python()
    with Volunteers(config, _say) as volunteers, as_main(script, arguments, module=module) as start:
        code = _run(start, volunteers)
    _say_how_it_ended(volunteers.guards, code)
    return code


def _end_before_python() -> None:
    """The threads of a process group must not outlive Python: one that still lets go of a tensor aborts the process.

    They end with their group, and that with the model in its wrapper, which is part of a cycle. Registered first, so
    called last: after what the script itself leaves for the end.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(gc.collect)


def _run(start: Callable[[], None], volunteers: Volunteers) -> int:
    try:
        start()
    except TrainingHalted:
        return EXIT_HALTED
    except SystemExit as ending:
        return _exit_code(ending.code)
    except BaseException as fault:
        volunteers.ended_by(fault)
        _print_fault(fault)
        return EXIT_INTERRUPTED if isinstance(fault, KeyboardInterrupt) else EXIT_SCRIPT_FAILED
    return 0


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return EXIT_SCRIPT_FAILED


def _print_fault(fault: BaseException) -> None:
    """Only the user's frames: the runner's own say nothing about their bug. A hook of theirs goes first."""
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(fault), fault, _without_runner(fault.__traceback__))
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


def _say(text: str) -> None:
    typer.echo(f"stepguard: {text}", err=True)


def _say_how_it_ended(guards: list[Guard], code: int) -> None:
    if not guards and code == 0:
        _say("no optimizer was guarded: the script made none that stepped in this process, or guards its own.")
    for guard in guards:
        if guard.rank == 0:
            _say(f"{guard.steps} steps guarded, {len(guard.incidents)} incidents.")

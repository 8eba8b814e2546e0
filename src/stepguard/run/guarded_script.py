"""Run a user's script under automatic guards, and turn its end into an exit code."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stepguard._errors import (
    EXIT_HALTED,
    EXIT_SCRIPT_FAILED,
    EXIT_USAGE,
    ConfigError,
    TrainingHalted,
)
from stepguard.checkpoints import Store
from stepguard.engine.wiring import check_watched
from stepguard.guard import Guard
from stepguard.records import GuardConfig
from stepguard.records.text import printable
from stepguard.report.phrases import count
from stepguard.run.autoguard import AutomaticGuards, NotRestored
from stepguard.run.script import as_main

EXIT_INTERRUPTED = 130
SWALLOWED = (0, EXIT_SCRIPT_FAILED)
"""Exit codes of a wrapper that has caught the stop; any other is the script's own choice."""
NAMED = ("last-good", "newest", "auto")
"""What `--restore` knows by name."""
_HERE = str(Path(__file__).parents[1])


def start_from(which: str, config: GuardConfig) -> str | None:
    """What `--restore` means for this run folder; None is a fresh start. Raises ConfigError."""
    if config.run_dir is None:
        raise ConfigError(
            f"--restore {which} needs the folder of the run; give --run-dir DIR before the script."
        )
    folder = Path(config.run_dir) / "checkpoints"
    if which not in NAMED:
        path = Path(which).resolve()
        if not path.is_dir():
            raise ConfigError(
                f"--restore {which} is neither {', '.join(NAMED)} nor a checkpoint folder."
            )
        return str(path)
    if folder.is_dir() and Store(folder).list():
        return "last-good" if which == "auto" else which
    if which == "auto":
        return None
    raise ConfigError(
        f"--restore {which} finds no checkpoint in {folder}; --restore auto starts afresh where "
        "there is none."
    )


def run_script(
    script: str,
    arguments: list[str],
    config: GuardConfig,
    *,
    module: bool = False,
    restore: str | None = None,
    ours: Sequence[str] = (),
) -> int:
    """Exit code: the script's own, 1 when it raised, 3 when the policy stopped it.

    `restore` names a checkpoint to go on from; `ours` are options that may have been misplaced.
    """
    check_watched(config)
    _end_before_python()
    with (
        AutomaticGuards(config, tell, restore) as automatic,
        as_main(script, arguments, module=module) as start,
    ):
        code = _run(start, automatic)
    if code in SWALLOWED and _halted(automatic.guards):
        code = EXIT_HALTED
    if code == EXIT_USAGE:
        _tell_misplaced(script, arguments, ours)
    tell_how_it_ended(automatic.guards, automatic.refused, code)
    return code


def _tell_misplaced(script: str, arguments: Sequence[str], ours: Sequence[str]) -> None:
    """The script refused its options: perhaps one of them was meant for stepguard."""
    for word in arguments:
        option = word.partition("=")[0]
        if option in ours:
            tell(
                f"{option} stands after the script and went to it; options of stepguard stand "
                f"before: stepguard run {option} ... {Path(script).name}"
            )
            return


def _end_before_python() -> None:
    """End the threads of a process group before Python ends."""
    # A thread that still frees a tensor while Python shuts down aborts the process. The threads
    # end with their group, and that with the DDP wrapper, which is part of a reference cycle.
    # Registered first, so called last: after what the script itself registers.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(gc.collect)


def _run(start: Callable[[], None], automatic: AutomaticGuards) -> int:
    try:
        start()
    except TrainingHalted:
        return EXIT_HALTED
    except NotRestored as refusal:
        tell(f"error: {refusal}")
        return EXIT_USAGE
    except SystemExit as ending:
        code = _exit_code(ending.code)
        if code == EXIT_SCRIPT_FAILED and _comes_from_a_stop(ending):
            return EXIT_HALTED
        return code
    except BaseException as fault:
        automatic.ended_by(fault)
        _print_fault(fault)
        if _comes_from_a_stop(fault):
            return EXIT_HALTED
        if isinstance(fault, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        return EXIT_SCRIPT_FAILED
    return 0


def _comes_from_a_stop(fault: BaseException) -> bool:
    """Did a wrapper catch TrainingHalted and leave otherwise, as hydra does with `sys.exit(1)`?"""
    seen: set[int] = set()
    found: BaseException | None = fault
    while found is not None and id(found) not in seen:
        if isinstance(found, TrainingHalted):
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False


def _halted(guards: list[Guard]) -> bool:
    """Did a guard stop the run, and the exception get lost in code that catches everything?"""
    return any(guard.incidents and guard.incidents[-1].stopped for guard in guards)


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return EXIT_SCRIPT_FAILED


def _print_fault(fault: BaseException) -> None:
    """Print the traceback without the runner's frames, by the script's excepthook if it has one."""
    # The hook that halting installs stands before the script's own.
    hook = getattr(sys.excepthook, "_previous", sys.excepthook)
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


def tell(text: str, whose: str = "") -> None:
    """Print one line to stderr; `whose` names the guard where there are several."""
    speaker = f"stepguard ({whose})" if whose else "stepguard"
    print(f"{speaker}: {printable(text)}", file=sys.stderr)


def tell_how_it_ended(guards: Sequence[Guard], refused: int, code: int) -> None:
    """Print the counts of every guard, or why there was none."""
    if not guards and code == 0:
        tell(_why_none(refused))
    for guard in guards:
        if guard.rank == 0:
            whose = guard.name if len(guards) > 1 else ""
            incidents = count(len(guard.incidents), "incident")
            tell(f"{count(guard.steps, 'step')} guarded, {incidents}.", whose)


def _why_none(refused: int) -> str:
    if refused:
        return "the run was not guarded: no optimizer of the script could be, for the reason above."
    return (
        "no optimizer was guarded: the script made none that stepped in this process, or guards "
        "its own."
    )

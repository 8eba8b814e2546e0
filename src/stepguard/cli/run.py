"""`stepguard run SCRIPT`: guard an unmodified script.

The first `optimizer.step()` of every optimizer in the process attaches a guard to it and to the model it finds.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stepguard._errors import EXIT_HALTED, EXIT_SCRIPT_FAILED, EXIT_USAGE, TrainingHalted

if TYPE_CHECKING:
    from stepguard.guard import Guard
    from stepguard.records import GuardConfig


def run(
    context: typer.Context,
    script: str = typer.Argument(help="The training script; everything after it goes to the script."),
    run_dir: str | None = typer.Option(None, "--run-dir", help="Folder for journal and incidents; none by default."),
    human_log: str | None = typer.Option(None, "--human-log", help="Folder for a readable latest.log."),
) -> None:
    """Run a training script under the guard, without changing it (also: torchrun -m stepguard run train.py)."""
    path = Path(script)
    if not path.is_file():
        typer.echo(f"stepguard: error: {script} does not exist; give the path of a Python script.", err=True)
        raise typer.Exit(EXIT_USAGE)
    from stepguard.records import GuardConfig

    raise typer.Exit(run_script(path, list(context.args), GuardConfig(run_dir=run_dir, human_log=human_log)))


def run_script(path: Path, arguments: list[str], config: GuardConfig) -> int:
    """Exit code: the script's own, 1 when it raised, 3 when the policy stopped it."""
    with _as_main(path, arguments), guarding_everything(config) as guards:
        try:
            runpy.run_path(str(path), run_name="__main__")
            code = 0
        except TrainingHalted:
            code = EXIT_HALTED
        except SystemExit as ending:
            code = _exit_code(ending.code)
        except BaseException as fault:
            _print_traceback(fault)
            code = EXIT_SCRIPT_FAILED
    _say_how_it_ended(guards)
    return code


@contextmanager
def guarding_everything(config: GuardConfig) -> Iterator[list[Guard]]:
    """Attach a guard to every optimizer at its first step; all are closed at the end."""
    from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

    from stepguard.cli.discover import model_of, scaler_in_use, scheduler_of
    from stepguard.engine.context import guarded
    from stepguard.guard import watch

    guards: list[Guard] = []

    def attach(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in guarded:
            return
        guards.append(
            watch(
                model_of(optimizer),
                optimizer,
                scheduler=scheduler_of(optimizer),
                scaler=scaler_in_use(),
                config=_for_guard(config, len(guards)),
            )
        )

    handle = register_optimizer_step_pre_hook(attach)
    try:
        yield guards
    finally:
        handle.remove()
        for guard in guards:
            guard.close()


def _for_guard(config: GuardConfig, index: int) -> GuardConfig:
    """Further optimizers (a GAN's second one) get run folders of their own."""
    from dataclasses import replace

    if index == 0 or config.run_dir is None:
        return config
    return replace(config, run_dir=Path(config.run_dir) / f"optimizer{index}", human_log=None)


@contextmanager
def _as_main(path: Path, arguments: list[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return EXIT_SCRIPT_FAILED


def _print_traceback(fault: BaseException) -> None:
    """Only the user's frames: the runner's own say nothing about their bug."""
    frames = traceback.extract_tb(fault.__traceback__)
    skip = next((i for i, f in enumerate(frames) if "runpy" not in f.filename and f.filename != __file__), 0)
    trace = fault.__traceback__
    for _ in range(skip):
        trace = trace.tb_next if trace is not None else None
    traceback.print_exception(type(fault), fault, trace)


def _say_how_it_ended(guards: list[Guard]) -> None:
    if not guards:
        typer.echo("stepguard: the script never called optimizer.step(), so nothing was guarded.", err=True)
        return
    for guard in guards:
        if guard.rank == 0:
            typer.echo(f"stepguard: {guard.steps} steps guarded, {len(guard.incidents)} incidents.", err=True)

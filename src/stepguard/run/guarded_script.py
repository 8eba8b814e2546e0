"""Run a user's script under automatic guards, and turn its end into an exit code."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import os
import runpy
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stepguard._errors import (
    EXIT_HALTED,
    EXIT_SCRIPT_FAILED,
    EXIT_USAGE,
    ConfigError,
    StepguardError,
    TrainingHalted,
)
from stepguard.checkpoints import Store
from stepguard.engine.context import automatic_guards, guarded
from stepguard.engine.drivers.schedule import scheduler_of
from stepguard.engine.wiring import check_watched, hear_optimizers, keeps_hearing, stop_hearing
from stepguard.guard import Guard
from stepguard.locate.source import variable_name
from stepguard.records import GuardConfig
from stepguard.records.codec import printable
from stepguard.report.phrases import count
from stepguard.report.sinks import LOGGER
from stepguard.sentinel.torch_patches import observe_loads
from stepguard.state.sharded import distributed
from stepguard.tensors.names import optimizer_parameter_ids, optimizer_parameters, wrap
from stepguard.watching import watch

# --- Run a user's script as the main program, in the surroundings that `python script.py` gives.


@contextmanager
def as_main(
    script: str | Path, arguments: list[str], *, module: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function that does what `python script arguments` (`module`: `python -m`) does."""
    path = Path(script).resolve()

    def run() -> None:
        if module:
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
            return
        # Not runpy.run_path: it changes sys.argv[0] or leaves __file__ relative, unlike python.
        with io.open_code(str(path)) as file:
            code = compile(file.read(), str(path), "exec", dont_inherit=True)
        main = ModuleType("__main__")
        main.__file__ = str(path)
        main.__loader__ = SourceFileLoader("__main__", str(path))
        sys.modules["__main__"] = main
        exec(code, main.__dict__)

    before = sys.argv, list(sys.path), sys.excepthook, sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    sys.excepthook = sys.__excepthook__
    # python -m searches the current directory first, python script.py that of the script.
    sys.path.insert(0, str(Path.cwd() if module else path.parent))
    try:
        yield run
    finally:
        sys.argv, sys.path[:], sys.excepthook, sys.modules["__main__"] = before


# --- Find the model, scheduler and scaler of an optimizer among the objects of the process.


class LooseParameters(nn.Module):
    """Stands in for a model when the parameters belong to no module."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        params = optimizer_parameters(optimizer)
        self.loose = nn.ParameterList([p for p in params if isinstance(p, nn.Parameter)])


def share(module: nn.Module, parameters: set[int]) -> int:
    """How many of the parameters, by their identities, lie in the module."""
    try:
        return sum(id(p) in parameters for p in module.parameters())
    except AttributeError:
        # Found by the garbage collector before its __init__ has run.
        return 0


def trained_by(
    optimizer: Optimizer, called: nn.Module | None = None
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The outermost module that holds the parameters, and further ones by name.

    `called` is preferred to what contains it: a trainer, an average of weights.
    """
    ours = optimizer_parameter_ids(optimizer)
    found = _outermost(ours)
    if called is not None:
        for position, module in enumerate(found):
            contains = any(part is called for part in module.modules())
            if contains and share(called, ours) == share(module, ours):
                found[position] = called
    if not found:
        return LooseParameters(optimizer), {}
    found.sort(key=lambda module: (share(module, ours), module is called), reverse=True)
    rest: dict[str, nn.Module] = {}
    for index, module in enumerate(found[1:], start=1):
        name = variable_name(module) or f"{type(module).__name__.lower()}{index}"
        rest[f"{name}{index}" if name in rest else name] = module
    return found[0], rest


def _outermost(parameters: set[int]) -> list[nn.Module]:
    held = [module for module in _living(nn.Module) if share(module, parameters)]
    held = [module for module in held if not isinstance(module, LooseParameters)]
    # Module.modules() begins with the module itself.
    inner = {id(part) for module in held for part in list(module.modules())[1:]}
    return [module for module in held if id(module) not in inner]


def _living(kind: type[Any]) -> list[Any]:
    # type() and not isinstance: proxies answer isinstance with side effects.
    return [o for o in gc.get_objects() if issubclass(type(o), kind)]


# --- Guard every optimizer of a process automatically, before its first step begins.


MOST_CALLS = 10_000
"""Module calls after which an optimizer without a model is left to its first step."""


class NotRestored(BaseException):
    """The checkpoint that was asked for cannot be loaded: the script must not start afresh.

    Not an Exception: a script that catches everything would train from the beginning.
    """


class AutomaticGuards:
    """A context manager; leaving it closes every guard and undoes every wrap.

    `restore`: load this checkpoint into every model and optimizer before its first step.
    """

    def __init__(
        self, config: GuardConfig, complain: Callable[[str], None], restore: str | None = None
    ) -> None:
        self._restore_from = restore
        self.guards: list[Guard] = []
        self.refused = 0
        """Optimizers that could not be guarded, each told with its reason."""
        self._config = config
        self._complain = complain
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._refused: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._early: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepping: list[int] = []
        self._calls = 0
        self._undo = ExitStack()
        self._loads = ExitStack()
        """Undone after the guards, whose own patch lies above it."""
        self._call_hook: ExitStack | None = None

    def __enter__(self) -> AutomaticGuards:
        wrap(self._undo, Optimizer, "__init__", self._noticing)
        observe_loads(self._loads)
        self._undo.callback(self._stop_listening)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        # guards are made while an optimizer steps, when no hook may be added
        keeps_hearing.add(self)
        hear_optimizers()
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()
        for guard in list(self.guards):
            # The value refers to its weak key: left there, neither would ever be freed.
            automatic_guards.pop(guard.optimizer, None)
            guard.close()
        self._loads.close()
        keeps_hearing.discard(self)
        stop_hearing()

    def ended_by(self, error: BaseException) -> None:
        """The script ends by this exception."""
        for guard in self.guards:
            guard.ended_by(error)

    # --- an optimizer is made ---

    def _noticing(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._known.add(optimizer)
            self._waiting.add(optimizer)
            self._calls = 0
            if self._call_hook is None:
                self._call_hook = ExitStack()
                wrap(self._call_hook, nn.Module, "__call__", self._before_call)

        return init

    def _stop_listening(self) -> None:
        if self._call_hook is not None:
            self._call_hook.close()
            self._call_hook = None

    # --- a module is called ---

    def _before_call(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._waiting and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._calls += 1
                for optimizer in list(self._waiting):
                    if optimizer in guarded or self._calls > MOST_CALLS:
                        self._waiting.discard(optimizer)
                    elif share(module, ours := optimizer_parameter_ids(optimizer)):
                        self._waiting.discard(optimizer)
                        others = [other for other in self._known if other is not optimizer]
                        # of one optimizer inside another, the one that steps first is the user's
                        if not any(ours & optimizer_parameter_ids(other) for other in others):
                            self._early.add(optimizer)
                            self._attach(optimizer, module)
                if not self._waiting:
                    self._stop_listening()
            return original(module, *args, **kwargs)

        return call

    # --- an optimizer steps ---

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A step that raised has left its optimizer in the list.
        self._after_step(optimizer, args, kwargs)
        inside_another = bool(self._stepping)
        self._stepping.append(id(optimizer))
        self._waiting.discard(optimizer)
        if optimizer in self._early:
            self._early.discard(optimizer)
            # A model that was called before it was wrapped in DDP gets a new guard.
            model = next((g.model for g in self.guards if g.optimizer is optimizer), None)
            wrapped = not distributed() or isinstance(model, DistributedDataParallel | None)
            if not wrapped and isinstance(trained_by(optimizer)[0], DistributedDataParallel):
                automatic_guards.pop(optimizer)()
        if optimizer in guarded or inside_another:
            return
        # a new optimizer in the place of an earlier one keeps its guard
        if not any(guard.port.follow(optimizer) for guard in self.guards):
            self._attach(optimizer, None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    # --- the guards ---

    def _attach(self, optimizer: Optimizer, called: nn.Module | None) -> None:
        if optimizer in self._refused:
            return
        # The one enabled GradScaler of the process, if there is exactly one.
        scalers = [scaler for scaler in _living(GradScaler) if scaler.is_enabled()]
        try:
            model, modules = trained_by(optimizer, called)
            guard = watch(
                model,
                optimizer,
                modules=modules,
                scheduler=scheduler_of(optimizer),
                scaler=scalers[0] if len(scalers) == 1 else None,
                config=self._config,
            )
        except Exception as fault:
            # The script must run, guarded or not.
            self._refused.add(optimizer)
            self.refused += 1
            self._complain(
                f"{type(optimizer).__name__} is not guarded: {type(fault).__name__}: {fault}"
            )
            return
        self.guards.append(guard)
        automatic_guards[optimizer] = functools.partial(self._make_way, guard)
        which = self._restore_from
        if which is None:
            return
        try:
            done = guard.restore(which)
        except StepguardError as fault:
            raise NotRestored(f"--restore {which}: {fault}") from fault
        if called is None:
            # Gradients belong to weights that are gone: the update at hand finds nothing to do.
            guard.optimizer.zero_grad(set_to_none=True)
        if guard.rank == 0:
            inform(
                self._config,
                f"{guard.name or 'the run'} continues after {count(done, 'step')}; the script's "
                "loop and data start from the beginning",
            )

    def _make_way(self, guard: Guard) -> None:
        """Close a guard because the user has built one for the same optimizer."""
        self.guards.remove(guard)
        guard.close()


# --- Run a user's script under automatic guards, and turn its end into an exit code.


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
        f"--restore {which} finds no checkpoint in {folder}; --restore auto starts from "
        "scratch if there is none."
    )


def with_journal(config: GuardConfig, script: str) -> GuardConfig:
    """Settings that keep a journal and incidents in `.stepguard/SCRIPT-TIME`, and no capsules.

    Ranks of one launcher meet in one folder: its time is the start of their common parent. Where
    that cannot be known, nothing is kept.
    """
    begun = time.time()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        try:
            begun = Path("/proc", str(os.getppid())).stat().st_ctime
        except OSError:
            return config
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(begun))
    home = Path.cwd() / ".stepguard"
    if not os.access(home if home.exists() else home.parent, os.W_OK):
        return config
    folder = home / f"{Path(script).stem}-{stamp}"
    return replace(config, run_dir=str(folder), capsule="off", on_signal="off")


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
    # A thread that still frees a tensor while Python shuts down aborts the process. The threads of
    # a process group end with it, and that with the DDP wrapper, part of a reference cycle.
    # Registered first, so called last: after what the script itself registers.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(gc.collect)
    with (
        AutomaticGuards(config, tell, restore) as automatic,
        as_main(script, arguments, module=module) as start,
    ):
        code = _run(start, automatic)
    guards = automatic.guards
    # a guard stopped the run, and the exception got lost in code that catches everything
    if code in SWALLOWED and any(one.incidents and one.incidents[-1].stopped for one in guards):
        code = EXIT_HALTED
    misplaced = [word.partition("=")[0] for word in arguments]
    misplaced = [option for option in misplaced if option in ours]
    if code == EXIT_USAGE and misplaced:
        # the script refused its options: perhaps one of them was meant for stepguard
        tell(
            f"{misplaced[0]} comes after the script and was passed to it; options of stepguard go "
            f"before it: stepguard run {misplaced[0]} ... {Path(script).name}"
        )
    _tell_how_it_ended(automatic, code, config)
    return code


def _show_journal(automatic: AutomaticGuards, config: GuardConfig) -> None:
    """Say where the journal is, once, and keep the default folder out of git."""
    folder = Path(config.run_dir) if config.run_dir is not None else None
    if folder is None or not folder.is_dir() or any(one.rank for one in automatic.guards):
        return
    if folder.parent.name == ".stepguard":
        (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    inform(config, f"journal in {folder}; show it: stepguard report {folder}")


def _tell_how_it_ended(automatic: AutomaticGuards, code: int, config: GuardConfig) -> None:
    guards = automatic.guards
    if not guards and code == 0 and automatic.refused:
        tell("the run was not guarded: no optimizer of the script could be, for the reason above.")
    elif not guards and code == 0:
        tell(
            "no optimizer was guarded: the script created none that stepped in this "
            "process, or it guards its own."
        )
    for guard in guards:
        if guard.rank == 0:
            whose = guard.name if len(guards) > 1 else ""
            incidents = count(len(guard.incidents), "incident")
            inform(config, f"{count(guard.steps, 'step')} guarded, {incidents}.", whose)
    _show_journal(automatic, config)


def _run(start: Callable[[], None], automatic: AutomaticGuards) -> int:
    try:
        start()
    except TrainingHalted:
        return EXIT_HALTED
    except NotRestored as refusal:
        tell(f"error: {refusal}")
        return EXIT_USAGE
    except SystemExit as ending:
        code = 0 if ending.code is None else ending.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = EXIT_SCRIPT_FAILED
        if code == EXIT_SCRIPT_FAILED and _comes_from_a_stop(ending):
            return EXIT_HALTED
        return code
    except BaseException as fault:
        automatic.ended_by(fault)
        # Print the traceback without the runner's frames, by the script's excepthook if it has
        # one.
        # The hook that halting installs stands before the script's own.
        hook = getattr(sys.excepthook, "_previous", sys.excepthook)
        if hook is not sys.__excepthook__:
            trace = fault.__traceback__
            while trace is not None and _ours(trace.tb_frame.f_code.co_filename):
                trace = trace.tb_next
            hook(type(fault), fault, trace)
        else:
            told = traceback.TracebackException.from_exception(fault)
            _keep_users_frames(told)
            print("".join(told.format()), end="", file=sys.stderr)
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


def inform(config: GuardConfig, text: str, whose: str = "") -> None:
    """Report what calls for no action, where `GuardConfig.terminal` lets the guard report it."""
    if config.terminal == "logging":
        LOGGER.info(f"({whose}) {text}" if whose else text)
    elif config.terminal == "auto":
        tell(text, whose)

"""Check what the user gave to a guard, and open what it writes to."""

from __future__ import annotations

import platform
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stepguard import __version__
from stepguard._errors import ConfigError
from stepguard.engine.context import Context, automatic_guards, guarded, own_steps, real_optimizer
from stepguard.engine.drivers.schedule import DeclaredRates, one_schedule
from stepguard.engine.incident.gradient_outliers import Outliers
from stepguard.engine.protect import (
    OutputLost,
    Outputs,
    add_people_outputs,
    borrowing,
    quiet_warning,
)
from stepguard.engine.result import data_parallel_wrapper
from stepguard.journal import Journal, starts_in, this_process
from stepguard.locate.replay import LocateBudget
from stepguard.locate.source import variable_name
from stepguard.ranks.agreement import Agreement
from stepguard.records import GuardConfig
from stepguard.records.codec import mask_settings
from stepguard.report.sinks import HumanLog
from stepguard.sentinel.gradients import Shares
from stepguard.state.batch import unwrapped
from stepguard.state.buffers import BufferKeeper, hooks_of
from stepguard.state.run_state import Ownership
from stepguard.state.sharded import sharded_part
from stepguard.tensors.names import wrapped_by_fsdp1
from stepguard.tensors.values import elements

T = TypeVar("T")
_labels: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
"""What the guarded optimizers of this process are called."""
_writing: weakref.WeakValueDictionary[tuple[Path, int, int], Context] = (
    weakref.WeakValueDictionary()
)
"""The guards of this process that write into a run folder, by folder, rank and lane."""
ENGINES = {
    "deepspeed": ("DeepSpeed", "call stepguard.integrations.deepspeed.guard(engine)"),
    "megatron": ("Megatron", "call stepguard.integrations.megatron.guard(model, optimizer)"),
}
"""By package: what people call the engine, and what to do instead."""


def build_context(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    scaler: GradScaler | None,
    modules: dict[str, nn.Module] | None,
    extra: dict[str, Any] | None,
    config: GuardConfig,
    *,
    inside: str = "",
) -> Context:
    """Check what the user gave and open what the guard writes to.

    `inside`: the engine whose own integration asks, so that its optimizer is not refused.
    """
    outer = optimizer
    optimizer = real_optimizer(optimizer)
    _refuse_averager(outer)
    _refuse_engines(model, optimizer, inside)
    _check(model, optimizer, modules, extra)
    scheduler = _checked_schedule(scheduler)
    model = data_parallel_wrapper(model) or model
    automatic_guards.pop(optimizer, lambda: None)()
    roots = {"": unwrapped(model), **(modules or {})}
    if config.clip_norm is not None:
        _check_clipping(roots)
    agreement = Agreement(model, config.ranks.timeout)
    place = _place(config, agreement.world_rank)
    lane = 0 if place is None else place[2]
    if lane:
        folder = None if config.run_dir is None else Path(config.run_dir) / f"optimizer{lane}"
        config = replace(config, run_dir=folder, human_log=None)
    context = Context(
        *(model, optimizer, scheduler, scaler),
        extra=dict(extra or {}),
        config=config,
        agreement=agreement,
        buffers=BufferKeeper(roots.values()),
        roots=roots,
        ownership=Ownership(roots, optimizer, guarded),
        declared=DeclaredRates(optimizer, scheduler),
        resources=ExitStack(),
        outer=own_steps(outer, optimizer),
        sharded=bool(sharded_part(roots.values())),
    )
    context.scales.static = config.loss_scale or 1.0
    context.memory.attached = hooks_of(model)
    context.memory.effort = LocateBudget(config.probes.locate_budget)
    context.run.lane = lane
    agreement.now = lambda: context.step
    if place is not None:
        first = _writing.get((*place[:2], 0))
        context.run.id = context.run.id if first is None else first.run.id
        _writing[place] = context
        context.resources.callback(_writing.pop, place, None)
    if context.sharded and agreement.mode == "collective":
        agreement.adds = True
        context.memory.shares = Shares(roots.values(), agreement.size)
    context.configure_rates()
    _register(context)
    if config.probes.outliers is not None:
        context.memory.outliers = Outliers(roots, optimizer)
    # All of them or, with what else has been installed by then undone, none.
    try:
        _open(context)
    except BaseException:
        context.resources.close()
        raise
    return context


def _place(config: GuardConfig, rank: int) -> tuple[Path, int, int] | None:
    """Folder, rank and lane: guards that share a folder at one time are the lanes of one run."""
    given = config.run_dir or config.human_log
    if given is None or borrowing():
        return None
    folder = Path(given).resolve()
    lane = next(lane for lane in count() if (folder, rank, lane) not in _writing)
    return folder, rank, lane


def _register(context: Context) -> None:
    """Number the guard."""
    taken = set(guarded.values())
    optimizer = context.optimizer
    model = context.roots[""]
    number = next(number for number in count() if number not in taken)
    guarded[optimizer] = number
    context.run.label = variable_name(context.outer or optimizer) or ""
    if not context.run.label or context.run.label in _labels.values():
        context.run.label = f"{context.run.label or 'optimizer'} {number}"
    _labels[optimizer] = context.run.label
    context.run.trains = (
        variable_name(context.model) or variable_name(model) or type(model).__name__
    )
    context.name_guard()
    context.resources.callback(context.agreement.close)
    # the loop may have made another one since
    context.resources.callback(lambda: guarded.pop(context.optimizer, None))
    context.resources.callback(_labels.pop, optimizer, None)


def _open(context: Context) -> None:
    config = context.config
    rank = context.agreement.world_rank
    outputs = context.outputs = Outputs(lambda: context.step)
    context.resources.callback(outputs.close)
    if not borrowing():
        if config.run_dir is not None:
            _open_journal(context, config.run_dir)
        if config.human_log is not None:
            log = _made(
                "GuardConfig.human_log", config.human_log, lambda folder: HumanLog(folder, rank)
            )
            outputs.add(log, "log", f"the readable log in {log.folder}")
        for sink in config.sinks if rank == 0 else ():
            outputs.add_user_sink(sink)
    # Messages name their guard only where a process has several.
    add_people_outputs(outputs, config, rank, lambda: context.run.name if len(guarded) > 1 else "")


def _open_journal(context: Context, run_dir: str | PathLike[str]) -> None:
    rank = context.agreement.world_rank
    try:
        journal = _made("GuardConfig.run_dir", run_dir, lambda folder: Journal(folder, rank))
    except ConfigError as error:
        if context.agreement.rank == 0:
            raise
        # the first rank writes what the run needs; a disk of another node must not end the job
        quiet_warning(f"stepguard: rank {rank} keeps no journal: {error}", OutputLost)
        return
    context.run.attempt = 1 + starts_in(Path(run_dir), rank)
    context.outputs.add_journal(journal)
    settings: dict[str, Any] = {}
    # asdict copies, and a logger cannot be copied
    for name, value in asdict(replace(context.config, sinks=())).items():
        plain = isinstance(value, int | float | str | dict | None)
        settings[name] = value if plain else str(value)
    settings["sinks"] = [repr(sink) for sink in context.config.sinks]
    context.outputs.line(
        "run",
        {
            "time": time.time(),
            "run": context.run.id,
            "attempt": context.run.attempt,
            "stepguard": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "process": this_process(),
            "rank": context.agreement.world_rank,
            "world": context.agreement.size,
            "agreement": context.agreement.mode,
            "optimizer": type(context.optimizer).__name__,
            "name": context.run.label,
            "lane": context.run.lane,
            "schedule": context.schedule,
            "parameters": sum(map(elements, context.parameters)),
            "lr": context.lr,
            "config": mask_settings(settings),
        },
    )


def _made(name: str, folder: str | PathLike[str], make: Callable[[Path], T]) -> T:
    """Make an output in `folder`; ConfigError if the folder cannot be written."""
    try:
        return make(Path(folder))
    except OSError as fault:
        raise ConfigError(
            f"{name}={str(folder)!r} cannot be written: {fault}; give a writable folder."
        ) from fault


def _refuse_engines(model: object, optimizer: object, inside: str) -> None:
    # Engines with an update of their own, told by their package: torch's hooks never run there.
    for item in (model, optimizer):
        packages = {kind.__module__.partition(".")[0] for kind in type(item).__mro__}
        for package in (packages & ENGINES.keys()) - {inside}:
            name, instead = ENGINES[package]
            raise ConfigError(
                f"{type(item).__name__} is {name}'s: it keeps gradients and weights in its "
                "own buffers and updates them itself, where a guard cannot stop an "
                f"update; {instead}, and check its checkpoints with stepguard.verify(path)."
            )


def _check(model: object, optimizer: object, modules: object, extra: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give the torch.nn.Module that is trained."
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer."
        )
    if modules is not None and not _are_named_modules(modules):
        raise ConfigError(
            "modules must be a dict of further modules by name, for instance "
            "{'criterion': loss_module}."
        )
    _check_extra(extra)


def _refuse_averager(optimizer: object) -> None:
    if hasattr(optimizer, "averager"):
        raise ConfigError(
            f"{type(optimizer).__name__} averages the weights of ranks that step "
            "independently, which a guard cannot judge collectively; reduce the gradients "
            "of every step (DistributedDataParallel) and give the optimizer inside it."
        )


def _check_clipping(roots: dict[str, nn.Module]) -> None:
    """Gradients of FSDP1 can be clipped through its root only."""
    if wrapped_by_fsdp1(roots[""]) and len(roots) == 1:
        return
    parts = (module for root in roots.values() for module in root.modules())
    if any(map(wrapped_by_fsdp1, parts)):
        raise ConfigError(
            "clip_norm needs the whole model to be wrapped in one FullyShardedDataParallel, which "
            "clips for all its parts; wrap it, or use stepguard.watch and clip in your loop."
        )


def _are_named_modules(modules: object) -> bool:
    if not isinstance(modules, dict):
        return False
    return all(name and isinstance(module, nn.Module) for name, module in modules.items())


def _checked_schedule(scheduler: Any) -> Any:
    """One scheduler, or several in one; refused where it is none."""
    if scheduler is None:
        return None
    several = isinstance(scheduler, list | tuple)
    for one in scheduler if several else [scheduler]:
        if not _has_methods(one, "step", "state_dict", "load_state_dict"):
            raise ConfigError(
                f"scheduler is a {type(one).__name__}; give a scheduler of "
                f"torch.optim.lr_scheduler, or a list of them."
            )
    return one_schedule(scheduler)


def _check_extra(extra: object) -> None:
    if extra is None:
        return
    named = extra if isinstance(extra, dict) else {"": extra}
    for name, item in named.items():
        if not name or not _has_methods(item, "state_dict", "load_state_dict"):
            raise ConfigError(
                f"state[{name!r}] is a {type(item).__name__}; give a dict of objects with "
                "state_dict and load_state_dict, for instance {'ema': ema}."
            )


def _has_methods(item: object, *names: str) -> bool:
    return all(callable(getattr(item, name, None)) for name in names)

"""What the parts of one guard share."""

from __future__ import annotations

import operator
import platform
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stepguard import __version__
from stepguard._errors import ConfigError
from stepguard.detect import History
from stepguard.engine.drivers.schedule import advance, members, one_schedule
from stepguard.engine.incident.declared_rates import DeclaredRates, group_rates
from stepguard.engine.incident.gradient_outliers import Outliers
from stepguard.engine.interception import borrowing
from stepguard.engine.outputs import Outputs, add_people_outputs
from stepguard.journal import Journal, starts_in
from stepguard.ledger import Ledger
from stepguard.locate.locate_budget import LocateBudget
from stepguard.policy import Budget
from stepguard.records import GuardConfig, Incident
from stepguard.report.humanlog import HumanLog
from stepguard.sentinel.rank_agreement import Agreement
from stepguard.state.buffers import BufferKeeper
from stepguard.state.ownership import Ownership
from stepguard.state.resumable_loader import ResumableLoader
from stepguard.state.step import Step, unwrapped
from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import elements, is_finite

T = TypeVar("T")

guarded: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that already have a guard in this process, and the number of each, from 0."""
automatic_guards: weakref.WeakKeyDictionary[Optimizer, Callable[[], None]] = weakref.WeakKeyDictionary()
"""Guards that `stepguard run` attached, and how to close each when the user builds one."""


@dataclass
class Context:
    """The user's objects, the settings, and the run's memory so far."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    """One scheduler, or several in one; None where the guard was given none."""
    scaler: GradScaler | None
    modules: dict[str, nn.Module]
    extra: dict[str, Any]
    """Further objects with a state: an EMA, a curriculum."""
    config: GuardConfig
    agreement: Agreement
    history: History
    buffers: BufferKeeper
    roots: dict[str, nn.Module]
    ownership: Ownership
    declared: DeclaredRates
    resources: ExitStack
    """Everything installed or opened; closing it undoes all."""
    name: str = ""
    """Which guard this is, where a process has several."""
    outputs: Outputs = field(default_factory=Outputs)
    """Journal, readable log, terminal and the user's loggers."""
    budget: Budget = field(default_factory=Budget)
    incidents: list[Incident] = field(default_factory=list)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Names this run in its checkpoints; a restored run goes on under the name it had."""
    attempt: int = 1
    """Which start in this run folder this process is."""
    commit_hooks: list[Callable[[], None]] = field(default_factory=list)
    step: int = 0
    """Index of the next optimizer step."""
    loss_scale: float = 1.0
    """Static scale; falls when it is what overflows."""
    accepted: set[str] = field(default_factory=set)
    """Stored tensors that are non-finite and that nobody minds: sentinels, and what
    `bad_start="note"` lets pass.
    """
    ignored: set[int] = field(default_factory=set)
    """Ids of accepted tensors, so that the cheap look leaves them out."""
    first_buffers: list[tuple[str, Tensor]] = field(default_factory=list)
    """Extremes of every buffer before the first step, on the device until something is wrong."""
    feed: ResumableLoader | None = None
    """The user's loader, where the guard was given it."""
    ledger: Ledger | None = None
    """Where lost samples are written down; made with the first loss."""
    resumed: bool = False
    """A checkpoint was restored in this process."""
    outliers: Outliers | None = None
    """Gradients of single tensors, where `GuardConfig.outliers` asks for it."""
    anchor: tuple[Step, float] | None = None
    """A healthy step and its loss, to tell hurt weights from hard data."""
    worked_scale: float | None = None
    """The highest loss scale at which an update was made."""
    overflows_in_a_row: int = 0
    """Steps in a row that a scaler's own scale has overflowed."""
    followed: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Values the user follows: name -> the step it was given in, and the value on its device."""
    effort: LocateBudget = field(default_factory=LocateBudget)
    """What placing an incident may cost."""
    last_read: float = field(default_factory=time.perf_counter)
    _told_waiting: bool = False
    _given: list[Tensor] = field(default_factory=list)
    """The optimizer's parameters when `_ordered` was made."""
    _ordered: list[Tensor] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer updates, in the model's order: the order
        `clip_grad_norm_(model.parameters())` adds in.

        Asked for several times a step, and walking a large model takes milliseconds: kept until the
        optimizer changes.
        """
        given = optimizer_parameters(self.optimizer)
        if len(given) != len(self._given) or not all(map(operator.is_, given, self._given)):
            ours = {id(p): p for p in given}
            ordered = {
                id(p): p for root in self.roots.values() for p in root.parameters() if id(p) in ours
            }
            self._given, self._ordered = given, list((ordered | ours).values())
        return self._ordered

    def follow(self, name: str, value: Tensor | float) -> None:
        """Keep a value for the present step's packet; of several elements, the largest magnitude."""
        given = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        if given.numel():
            # a copy: the update must not change what was seen before it
            self.followed[name] = (
                self.step,
                given.abs().amax() if given.numel() > 1 else given.reshape(()).clone(),
            )

    @property
    def lr(self) -> tuple[float, ...]:
        """One rate a group; none at all for an optimizer that finds its own step size."""
        return group_rates(self.optimizer)

    @property
    def maximizes(self) -> bool:
        """True where every parameter group maximizes what the loss function returns."""
        return all(group.get("maximize", False) for group in self.optimizer.param_groups)

    @property
    def lr_ceiling(self) -> tuple[float, ...]:
        return tuple(
            self.history.ceiling(i) or float("inf") for i in range(len(self.optimizer.param_groups))
        )

    def expect_declared_rates(self, rates: tuple[float, ...]) -> None:
        """Before rates are judged: what the schedule and the groups declare counts as configured."""
        if self.config.lr is None:
            suspicious = self.history.excess_lr(rates) is not None
            known = self.declared.known(rates, self.step, suspicious=suspicious)
            self.history.configured_lr = known or self.history.configured_lr

    def advance_schedule(self) -> None:
        """An update went through: where the guard drives the schedule, it goes one step on."""
        if self.scheduler is None or self.config.scheduler_every != "step":
            return
        waiting = advance(self.scheduler)
        if waiting and not self._told_waiting:
            self._told_waiting = True
            summary = (
                f"{waiting[0]}.step needs a value, so guard.step leaves it to your loop: call "
                f"scheduler.step(value) "
                "there, or give GuardConfig(scheduler_every='epoch') and a loader: a plateau "
                "scheduler then gets the "
                "mean loss of each pass"
            )
            self.outputs.note("schedule", summary)

    def on_purpose(self) -> set[str]:
        """Buffers that held Inf or NaN from the beginning are meant to; reads the device the first
        time.
        """
        found, self.first_buffers = self.first_buffers, []
        self.accepted.update(
            f"buffer:{name}" for name, extremes in found if not is_finite(extremes)
        )
        return self.accepted

    def scaling(self) -> bool:
        """Does a GradScaler really scale?"""
        return self.scaler is not None and self.scaler.is_enabled()


def build_context(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    scaler: GradScaler | None,
    modules: dict[str, nn.Module] | None,
    extra: dict[str, Any] | None,
    config: GuardConfig,
) -> Context:
    """Check what the user gave and open what the guard writes to."""
    optimizer = real_optimizer(optimizer)
    _check(model, optimizer, modules, extra)
    scheduler = _checked_schedule(scheduler)
    automatic_guards.pop(optimizer, lambda: None)()
    roots = {"": unwrapped(model), **(modules or {})}
    agreement = Agreement(model)
    context = Context(
        *(model, optimizer, scheduler, scaler),
        modules=dict(modules or {}),
        extra=dict(extra or {}),
        config=config,
        agreement=agreement,
        history=History(window=config.spike_window),
        buffers=BufferKeeper(roots.values()),
        roots=roots,
        ownership=Ownership(roots, optimizer, guarded),
        declared=DeclaredRates(optimizer, scheduler),
        resources=ExitStack(),
        loss_scale=config.loss_scale or 1.0,
        effort=LocateBudget(config.locate_budget),
    )
    _configure_rates(context)
    _register(context)
    if config.outliers is not None:
        context.outliers = Outliers(config.outliers, roots, optimizer)
    _open_files(context)
    return context


def _configure_rates(context: Context) -> None:
    """What the user says the rate should be, else what groups and schedule declare."""
    if context.config.lr is not None:
        context.history.configured_lr = tuple(context.config.lr for _ in context.lr)
    else:
        context.history.configured_lr = context.declared.known(context.lr, 0, suspicious=False)


def _register(context: Context) -> None:
    """Number the guard."""
    optimizer, model = context.optimizer, context.roots[""]
    number = next(number for number in count() if number not in guarded.values())
    context.name = f"optimizer {number}: {type(optimizer).__name__} of {type(model).__name__}"
    context.resources.callback(context.agreement.close)
    guarded[optimizer] = number
    context.resources.callback(guarded.pop, optimizer, None)


def bare_step(context: Context) -> Step:
    """The last step, when nothing of it can be run again."""
    index = max(context.step - 1, 0)
    return Step(index, context.model, context.optimizer, context.modules, context.buffers)


def _open_files(context: Context) -> None:
    """All of them or, with what else has been installed by then undone, none."""
    try:
        _open(context)
    except BaseException:
        context.resources.close()
        raise


def _open(context: Context) -> None:
    config = context.config
    rank = context.agreement.rank
    name = context.name
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
    add_people_outputs(outputs, config, rank, lambda: name if len(guarded) > 1 else "")


def _open_journal(context: Context, run_dir: str | PathLike[str]) -> None:
    rank = context.agreement.rank
    journal = _made("GuardConfig.run_dir", run_dir, lambda folder: Journal(folder, rank))
    context.attempt = 1 + starts_in(Path(run_dir), rank)
    context.outputs.add_journal(journal)
    context.outputs.line("run", _header(context))


def _made(name: str, folder: str | PathLike[str], make: Callable[[Path], T]) -> T:
    """A folder that cannot be written from the start is a setting that cannot be meant."""
    try:
        return make(Path(folder))
    except OSError as fault:
        raise ConfigError(
            f"{name}={str(folder)!r} cannot be written: {fault}; give a folder that can."
        ) from fault


def _header(context: Context) -> dict[str, Any]:
    settings: dict[str, Any] = {
        k: v if isinstance(v, int | float | str | dict | None) else str(v)
        for k, v in asdict(
            replace(context.config, sinks=())
        ).items()  # asdict copies, and a logger cannot be copied
    }
    settings["sinks"] = [repr(sink) for sink in context.config.sinks]
    return {
        "time": time.time(),
        "run": context.run_id,
        "attempt": context.attempt,
        "stepguard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rank": context.agreement.rank,
        "world": context.agreement.size,
        "agreement": context.agreement.mode,
        "optimizer": type(context.optimizer).__name__,
        "schedule": _schedule(context.scheduler),
        "parameters": sum(map(elements, context.parameters)),
        "lr": context.lr,
        "config": settings,
    }


def _schedule(scheduler: Any) -> str:
    named = [s for s in members(scheduler) if s is not None and hasattr(s, "last_epoch")]
    return f"{type(named[0]).__name__} at {named[0].last_epoch}" if named else ""


def real_optimizer(optimizer: Optimizer) -> Optimizer:
    """accelerate's wrapper has no hook lists of its own; the optimizer inside has."""
    inner = getattr(optimizer, "optimizer", None)
    return (
        inner
        if isinstance(inner, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks")
        else optimizer
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
    if modules is not None and not (
        isinstance(modules, dict)
        and all(k and isinstance(m, nn.Module) for k, m in modules.items())
    ):
        raise ConfigError(
            "modules must be a dict of further modules by name, for instance {'criterion': "
            "loss_module}."
        )
    _check_extra(extra)


def _checked_schedule(scheduler: Any) -> Any:
    """One scheduler, or several in one; refused where it is none."""
    if scheduler is None:
        return None
    for one in scheduler if isinstance(scheduler, list | tuple) else [scheduler]:
        if not all(
            callable(getattr(one, method, None))
            for method in ("step", "state_dict", "load_state_dict")
        ):
            raise ConfigError(
                f"scheduler is a {type(one).__name__}; give a scheduler of "
                f"torch.optim.lr_scheduler, or a list of them."
            )
    return one_schedule(scheduler)


def _check_extra(extra: object) -> None:
    if extra is None:
        return
    for name, item in extra.items() if isinstance(extra, dict) else [("", extra)]:
        if not name or not all(
            callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict")
        ):
            raise ConfigError(
                f"state[{name!r}] is a {type(item).__name__}; give a dict of objects with "
                f"state_dict and "
                "load_state_dict, for instance {'ema': ema}."
            )

"""What the parts of one guard share."""

from __future__ import annotations

import operator
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stepguard.engine.drivers.schedule import (
    READ_EVERY,
    READ_FIRST,
    DeclaredRates,
    advance,
    as_number,
    named_position,
    scheduler_of,
)
from stepguard.engine.incident.gradient_outliers import Outliers
from stepguard.engine.protect import Outputs
from stepguard.judge import History
from stepguard.judge.decide import Budget
from stepguard.ledger import Ledger
from stepguard.locate.replay import LocateBudget
from stepguard.ranks.agreement import Agreement
from stepguard.records import Decision, GuardConfig, Incident, Reading
from stepguard.records.incident import box
from stepguard.sentinel.gradients import GradientNorm, GradientNorms, Shares
from stepguard.state.batch import Step
from stepguard.state.buffers import AttachedState, BufferKeeper
from stepguard.state.capsule import WindowStep
from stepguard.state.loader import RecentBatches, ResumableLoader
from stepguard.state.run_state import Ownership
from stepguard.state.snapshot import Snapshot
from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import is_finite

# --- What a watched loop does with its gradients between two updates: kept, dropped, mixed.

WINDOW = 16
"""Updates that are remembered."""
MOST_NODES = 5000


@dataclass(slots=True)
class GradientHabits:
    """Kept over the run. Nothing here reads a value, but for one gradient, once."""

    other_steps: int = 0
    """Updates of other optimizers in this process."""
    calls: int = 0
    """Calls of the model."""
    _updates: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _found: set[str] = field(default_factory=set)
    """What the step at hand did: `carried`, `discarded`, `foreign`."""
    _used: tuple[weakref.ref[Tensor], int] | None = None
    """A gradient of the last update, and how often it had been written then."""
    _at_backward: tuple[int, int, int] = (0, 0, 0)
    """Other updates, calls of the model and writes to a weight when the last own backward ended."""
    _harmless: bool = False
    """Gradients are dropped on purpose, or what is carried over is 0."""
    _searched: bool = False
    _read: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """How many of the last updates did each of these."""
        found: dict[str, int] = {}
        for update in self._updates:
            for name in update:
                found[name] = found.get(name, 0) + 1
        return found

    def backward_begins(
        self, root: Tensor, parameters: list[Tensor], *, first: bool, dropped: bool
    ) -> None:
        """`first`: of this update; `dropped`: the gradients of the last one are gone."""
        if not self._searched and self._updates and "discarded" in self._updates[-1]:
            self._search_inputs(root, parameters)
        if first:
            self._found.discard("carried")
            if self._used is not None and not self._harmless and self._is_carried(parameters):
                self._found.add("carried")
            return
        others, calls, writes = self._at_backward
        if not dropped:
            if self.other_steps > others:
                self._found.add("foreign")
            return
        self._found -= {"carried", "foreign"}
        same_weights = bool(parameters) and parameters[0]._version == writes
        # another player's loss may reach these gradients, and is dropped on purpose
        if not self.other_steps and self.calls > calls and same_weights and not self._harmless:
            self._found.add("discarded")

    def _is_carried(self, parameters: list[Tensor]) -> bool:
        assert self._used is not None
        gradient, writes = self._used[0](), self._used[1]
        if gradient is None or gradient._version != writes:
            return False
        if not any(parameter.grad is gradient for parameter in parameters):
            return False
        if not self._read:
            self._read = True
            self._harmless = not bool((gradient != 0).any())  # the optimizer zeroes them itself
        return not self._harmless

    def backward_over(self, parameters: list[Tensor]) -> None:
        """A backward pass has left gradients in these parameters."""
        writes = parameters[0]._version if parameters else 0
        self._at_backward = (self.other_steps, self.calls, writes)

    def _search_inputs(self, root: Tensor, parameters: list[Tensor]) -> None:
        """Once, where gradients are dropped: are those of inputs wanted, as by an attack?"""
        self._searched = True
        known = {id(parameter) for parameter in parameters}
        waiting: list[Any] = [root.grad_fn]
        seen: set[Any] = set()
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and id(variable) not in known:
                self._harmless = True
            waiting += [behind for behind, _ in node.next_functions]

    def update_made(self, parameters: list[Tensor], identities: list[int]) -> None:
        """An optimizer step is over. `identities` of the gradients of these parameters after the
        last backward pass, 0 for none.
        """
        gradient: Tensor | None = None
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                break
        if gradient is None and any(identities):
            self._found = {"thrown"}
        elif "discarded" in self._found:
            now = [0 if p.grad is None else id(p.grad) for p in parameters]
            if now != identities:
                self._harmless = True  # the loop has put gradients of its own there
                self._found.discard("discarded")
        self._updates.append(frozenset(self._found))
        self._found = set()
        self._used = None if gradient is None else (weakref.ref(gradient), gradient._version)


# --- What plug-ins are given: the moments of a step, and the way that led to a bad one.


class StepProbe:
    """Called at each moment of every step. Nothing happens here."""

    active = False
    """Between `begin` and `finish`: does this step have to be followed? If not, only `begin`,
    `finish` and `committed` are called."""
    audits = False
    """Is the step at hand to be run again once it has been found healthy?"""

    def observe_loaders(self, recent: RecentBatches) -> None:
        """What the loaders of the process deliver is remembered here."""

    def begin(self) -> None:
        """The next step is about to begin."""

    def evaluates(self, model: nn.Module) -> bool:
        """The model is called without gradients, in training mode. True: its output is wanted."""
        return False

    def evaluated(self, output: Any) -> None:
        """What that call has returned."""

    def saw_batch(self, batch: Any) -> None:
        """The data of the step, or of one call of the model."""

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass begins at this loss."""

    def backward_over(self) -> None:
        """A backward pass of the loop is over; others may follow before the update."""

    def norm_taken(self) -> None:
        """The loop takes the norm of all gradients, to clip them."""

    def gradients_ready(self) -> None:
        """Forward and backward are over: what follows is the guard's work."""

    def audit(self, step: Step) -> None:
        """The step is healthy and can be run again from here; its update comes next."""

    def before_update(self) -> None:
        """The optimizer steps next."""

    def finish(self, *, committed: bool) -> None:
        """The step is over, read or not."""

    def committed(self, reading: Reading) -> None:
        """The update of a step that was read went through."""

    def skipped(self, reading: Reading) -> None:
        """A GradScaler skipped the update."""

    def run_ended(self) -> None:
        """The run is over, and no error has cut it short."""

    def close(self) -> None:
        """The step at hand will not be finished."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work of the guard in the middle of the user's step."""
        yield


@dataclass(slots=True)
class LeadUp:
    """What a guard keeps of its last bad step, by reference."""

    incident: str
    """Id of the incident."""
    step: Step
    bad: WindowStep
    timeline: int
    """Rewinds that the run had made by then."""
    snapshot: Snapshot | None = None
    """Where the steps began; None: with the bad step itself."""
    steps: list[WindowStep] = field(default_factory=list)
    """Steps since the snapshot, without the bad one."""
    earlier: list[WindowStep] = field(default_factory=list)
    """Healthy steps from before the snapshot."""
    failed_before: list[WindowStep] = field(default_factory=list)
    """Bad steps shortly before this one, oldest first."""
    committed: int = 0
    """Updates that the run had made by then."""
    first: LeadUp | None = None
    """The first bad step of a chain of them, with no good one between."""


# --- What the parts of one guard share.


T = TypeVar("T")

guarded: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that already have a guard in this process, and the number of each, from 0."""
Close = Callable[[], None]
automatic_guards: weakref.WeakKeyDictionary[Optimizer, Close] = weakref.WeakKeyDictionary()
"""Optimizers that `stepguard run` guards, and how each guard makes way for the user's own."""


@dataclass
class RunIdentity:
    """What a guard is called, and which part of a run it sees."""

    name: str = ""
    """Which guard this is, where a process has several."""
    label: str = ""
    """What the user calls the optimizer."""
    trains: str = ""
    """The user's name of the model."""
    lane: int = 0
    """Which optimizer of its run this is, in the order of their guards."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Names this run in its checkpoints; a restored run goes on under the name it had."""
    attempt: int = 1
    """Which start in this run folder this process is."""
    resumed: bool = False
    """A checkpoint was restored in this process."""
    resumed_at: int = 0
    """The step at which it was."""
    marked: tuple[int, int] = (0, 0)
    """How far this rank has come: a step, and how many backward passes and updates of it."""


@dataclass
class Hooks:
    """Called at moments of a step."""

    adopted: list[Callable[[Optimizer], None]] = field(default_factory=list)
    """With an optimizer that takes the place of the one before."""
    updated: list[Callable[[], None]] = field(default_factory=list)
    """After every update that really happened."""
    gradients: list[Callable[[], None]] = field(default_factory=list)
    """When the gradients of a step are there, before anything is updated."""
    committed: list[Callable[[Step], None]] = field(default_factory=list)
    """With every step whose update was made."""
    probe: StepProbe = field(default_factory=StepProbe)
    """Follows healthy steps, where the guard has put one in."""
    what_helps: Callable[[Incident, Decision], Decision] | None = None
    """Tries what helps before a decision is applied, where the policy asks for it."""


@dataclass
class MeantNonFinite:
    """Tensors that may be non-finite: sentinels, and what `note` accepts at the start."""

    names: set[str] = field(default_factory=set)
    """`param:NAME`, `buffer:NAME`, `opt:PARAMETER/SLOT`, and `extra:OBJECT/...` as a saved state
    names it.
    """
    ignored: set[int] = field(default_factory=set)
    """Ids of the tensors that the cheap check skips."""
    first_buffers: list[tuple[str, Tensor]] = field(default_factory=list)
    """Full name and extremes of every buffer before the first step, and of what further objects
    keep; on the device until something is wrong."""


@dataclass
class DataFeed:
    """Where batches come from, and what is known of their samples."""

    feed: ResumableLoader | None = None
    """The user's loader, where the guard was given it."""
    recent: RecentBatches | None = None
    """The last batches that this loader, or else any DataLoader of the process, delivered."""
    tokenizer: Any = None
    """The Trainer's tokenizer, which turns `input_ids` into text."""
    ledger: Ledger | None = None
    """Where lost samples are written down; made with the first loss."""


@dataclass
class LossScales:
    """What is known of loss scales and overflows."""

    static: float = 1.0
    """The static loss scale; halved when the scale itself makes gradients overflow."""
    worked: float | None = None
    """The highest loss scale at which an update was made."""
    loss_overflows: int = 0
    """Steps whose loss was infinite only because finite values were added up."""
    overflows_in_a_row: int = 0
    """Steps in a row that a scaler's own scale has overflowed."""


@dataclass
class Memory:
    """What parts of a guard remember of earlier steps."""

    attached: AttachedState = field(default_factory=lambda: AttachedState(dict))
    """States of communication hooks: what they remember of gradients is part of a step."""
    shares: Shares | None = None
    """Measures gradients of which each rank holds a part."""
    first_size: Tensor | float | None = None
    """Root mean square of the weights before the first step of the run, on its device."""
    outliers: Outliers | None = None
    """Gradients of single tensors, where `Probes.outliers` asks for it."""
    lead_up: LeadUp | None = None
    """The last bad step and the steps that led to it."""
    anchor: tuple[Step, float] | None = None
    """A healthy step and its loss, to tell hurt weights from hard data."""
    missed: str = ""
    """An update that this rank refused alone, in words; all ranks learn of it in the next step."""
    followed: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Values the user follows: name -> the step it was given in, and the value on its device."""
    habits: GradientHabits = field(default_factory=GradientHabits)
    """What a watched loop does with its gradients."""
    effort: LocateBudget = field(default_factory=LocateBudget)
    """What locating an incident may cost."""
    own_reading: Reading | None = None
    """What this rank itself saw of the last bad step, where ranks have agreed on another's."""
    gradient_norms: GradientNorms = field(default_factory=GradientNorms)
    """Norms of single gradients in the last steps, on the device until something is wrong."""
    norm_of_ranks: tuple[int, GradientNorm | None] | None = None
    """The step that gradients of all ranks were last measured in, and their norm."""
    last_read: float = field(default_factory=time.perf_counter)
    given: list[Tensor] = field(default_factory=list)
    """The optimizer's parameters when `ordered` was made."""
    ordered: list[Tensor] = field(default_factory=list)


@dataclass
class Context:
    """The user's objects, the settings, and the run so far."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    """One scheduler, or several in one; None where the guard was given none."""
    scaler: GradScaler | None
    extra: dict[str, Any]
    """Further objects with a state: an EMA, a curriculum."""
    config: GuardConfig
    agreement: Agreement
    buffers: BufferKeeper
    roots: dict[str, nn.Module]
    """The model under the empty name, and the further modules that the guard was given."""
    ownership: Ownership
    declared: DeclaredRates
    resources: ExitStack
    """Everything installed or opened; closing it undoes all."""
    outer: Optimizer | None = None
    """A wrapper around `optimizer` that the user steps, such as PostLocalSGDOptimizer."""
    sharded: bool = False
    """No rank holds all parameters, so no step can be replayed by one rank alone."""
    outputs: Outputs = field(default_factory=Outputs)
    """Journal, readable log, terminal and the user's loggers."""
    history: History = field(default_factory=History)
    budget: Budget = field(default_factory=Budget)
    incidents: list[Incident] = field(default_factory=list)
    step: int = 0
    """Index of the next optimizer step."""
    run: RunIdentity = field(default_factory=RunIdentity)
    hooks: Hooks = field(default_factory=Hooks)
    meant: MeantNonFinite = field(default_factory=MeantNonFinite)
    data: DataFeed = field(default_factory=DataFeed)
    scales: LossScales = field(default_factory=LossScales)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        self.modules = {name: module for name, module in self.roots.items() if name}
        """The further modules that the guard was given."""

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer updates, in the order in which the model lists it.

        That is the order in which `clip_grad_norm_(model.parameters())` adds, and another order
        gives other last bits. Kept until the optimizer changes: walking a large model takes
        milliseconds.
        """
        groups = self.optimizer.param_groups
        given = groups[0]["params"] if len(groups) == 1 else optimizer_parameters(self.optimizer)
        before = self.memory.given
        if len(given) != len(before) or not all(map(operator.is_, given, before)):
            self.memory.given = list(given)
            left = {id(parameter): parameter for parameter in given}
            ordered = []
            for root in self.roots.values():
                for parameter in root.parameters():
                    if left.pop(id(parameter), None) is not None:
                        ordered.append(parameter)
            self.memory.ordered = [*ordered, *left.values()]
        return self.memory.ordered

    def adopt(self, optimizer: Optimizer) -> None:
        """Take this optimizer, and its schedule, in the place of the one before."""
        for tell in self.hooks.adopted:
            tell(optimizer)  # first: one may refuse
        before = self.optimizer
        guarded[optimizer] = guarded.pop(before, 0)
        if before in automatic_guards:
            automatic_guards[optimizer] = automatic_guards.pop(before)
        self.optimizer = optimizer
        self.outer = None
        if self.scheduler is not None:
            self.scheduler = scheduler_of(optimizer)
        self.ownership.optimizer = optimizer
        advances = self.declared.advances
        self.declared = DeclaredRates(optimizer, self.scheduler)
        self.declared.advances = advances
        self.history.first_lr = self.history.top_lr = ()
        self.configure_rates()
        if self.memory.outliers is not None:
            self.memory.outliers = Outliers(self.roots, optimizer)
        self.name_guard()

    def configure_rates(self) -> None:
        """What groups and schedule declare."""
        self.history.configured_lr = self.declared.known(self.lr, suspicious=False)

    def name_guard(self) -> None:
        """By the user's names of its optimizer and its model."""
        self.run.name = f"{self.run.label}: {type(self.optimizer).__name__} of {self.run.trains}"

    def follow(self, name: str, value: Tensor | float) -> None:
        """Keep a value for this step's packet; of several elements the largest magnitude."""
        given = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        if given.numel() > 1:
            self.memory.followed[name] = (self.step, given.abs().amax())
        elif given.numel():
            # a copy: the update must not change what was seen before it
            self.memory.followed[name] = (self.step, given.reshape(()).clone())

    @property
    def lr(self) -> tuple[float, ...]:
        """One rate a group, 0 for one that lacks it; none where the optimizer finds its own."""
        rates: list[float | None] = []
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            rates.append(rate if type(rate) is float else as_number(rate))
        if None not in rates:
            return tuple(rates)  # type: ignore[arg-type]
        if rates == [None] * len(rates):
            return ()
        return tuple(rate or 0.0 for rate in rates)

    @property
    def schedule(self) -> str:
        """The schedule that the guard was given, and how far it has come."""
        return "" if self.scheduler is None else named_position(self.scheduler)

    @property
    def place(self) -> tuple[int, int]:
        """How far this rank has come in the run."""
        step, marks = self.run.marked
        return self.step, marks if step == self.step else 0

    def mark(self) -> None:
        """This rank has come to the next backward pass, or to the update."""
        step, marks = self.place
        self.run.marked = step, marks + 1

    @property
    def maximizes(self) -> bool:
        """True where every parameter group maximizes what the loss function returns."""
        for group in self.optimizer.param_groups:  # noqa: SIM110 - asked in every step
            if not group.get("maximize"):
                return False
        return True

    @property
    def lr_ceiling(self) -> tuple[float, ...]:
        """The highest learning rate of each group that is known to be meant."""
        ceilings = []
        for group in range(len(self.optimizer.param_groups)):
            ceilings.append(self.history.ceiling(group) or float("inf"))
        return tuple(ceilings)

    def expect_declared_rates(self, rates: tuple[float, ...]) -> None:
        """Count what schedule and groups declare as configured, before rates are judged."""
        suspicious = self.history.excess_lr(rates) is not None
        if suspicious or self.step < READ_FIRST or self.step % READ_EVERY == 0:
            known = self.declared.known(rates, suspicious=suspicious)
            self.history.configured_lr = known or self.history.configured_lr

    def advance_schedule(self) -> None:
        """An update went through: where the guard drives the schedule, it goes one step on."""
        if self.scheduler is None or not self.declared.advances:
            return
        waiting = advance(self.scheduler)
        if waiting and not self.declared.told_waiting:
            self.declared.told_waiting = True
            summary = (
                f"{waiting[0]}.step needs a value, so guard.step leaves it to your loop: call "
                "scheduler.step(value) there"
            )
            self.outputs.note("schedule", summary)

    @property
    def stepped(self) -> Optimizer:
        """The optimizer that a loop calls: the wrapper, where there is one."""
        return self.outer or self.optimizer

    def remember(self) -> None:
        """A step begins: remember buffers, attributes of modules and states of hooks."""
        self.buffers.remember()
        self.memory.attached.remember()

    def put_back(self) -> None:
        """Undo what the step's forward and backward changed."""
        self.buffers.restore()
        reset = self.memory.attached.restore()
        if reset:
            self.outputs.note(
                "veto", f"set to 0, because the step overwrote it: {', '.join(reset)}"
            )

    def on_purpose(self) -> set[str]:
        """Names of what may be non-finite, as are buffers that were so before the first step.

        Reads the device the first time.
        """
        for name, extremes in self.meant.first_buffers:
            if not is_finite(extremes):
                self.meant.names.add(name)
        self.meant.first_buffers = []
        return self.meant.names

    def scaling(self) -> bool:
        """Does a GradScaler really scale?"""
        return self.scaler is not None and self.scaler.is_enabled()


def bare_step(context: Context) -> Step:
    """The last step, when nothing of it can be run again."""
    index = max(context.step - 1, 0)
    return Step(
        *(index, context.model, context.optimizer, context.modules, context.buffers),
        sharded=context.sharded,
    )


def real_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper that has no hook lists of its own.

    Such are accelerate's, torchft's and PostLocalSGDOptimizer: optimizers by class, made without
    torch's constructor.
    """
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    inner = [item for item in vars(optimizer).values() if isinstance(item, Optimizer)]
    return real_optimizer(inner[0]) if len(inner) == 1 else optimizer


def own_steps(given: Optimizer, real: Optimizer) -> Optimizer | None:
    """Return the wrapper where its `step` does more than that of the optimizer inside."""
    if given is real or type(given).__module__.startswith("accelerate."):
        # accelerate's own leaves out steps in which gradients are added up; guard.step adds them up
        return None
    return given


# --- What a guard shows of itself, in one line and in a notebook. Never waits for the device.


SHOWN = 5
"""Incidents, the newest ones, that a notebook shows."""


def guard_line(context: Context, *, closed: bool, armed: bool) -> str:
    """`Guard of AdamW of Net: 12 steps, 1 incident, armed`."""
    count = len(context.incidents)
    counted = "1 incident" if count == 1 else f"{count} incidents"
    state = "armed" if armed else "disarmed"
    if closed:
        state = "closed"
    return f"Guard of {context.run.name}: {context.step} steps, {counted}, {state}"


def guard_html(context: Context, *, closed: bool, armed: bool) -> str:
    """The line, and the newest incidents below it."""
    rows = []
    for incident in context.incidents[-SHOWN:]:
        rows.append((f"step {incident.step}", incident.summary))
    title = guard_line(context, closed=closed, armed=armed)
    return box(title, rows, bad=bool(context.incidents))

"""Run one micro-batch of the bad step again: same RNG, buffers, batch and loss scale.

The user's loss function is called from this file: its frames mark where the user's code begins, see
`source`.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from operator import is_
from statistics import median
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate import evidence
from stepguard.locate.evidence import kept_tensors
from stepguard.locate.loss_graph import read_origin
from stepguard.locate.operands import Stage, batch_tensors, numeric
from stepguard.locate.source import Line, ModuleSpans, is_users, with_source
from stepguard.locate.tracer import Ran, Tracer
from stepguard.records.incident import Origin, Reading
from stepguard.state.batch import Step, rebuild, total_loss
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import came_back_finite, gradients_came_back_finite, untouched
from stepguard.state.python_state import KeptLeaf, KeptTensor, keep_generator
from stepguard.state.rng import restore_rng
from stepguard.tensors.names import named_buffers, named_parameters
from stepguard.tensors.values import is_finite

# --- Limit the time that locating an incident may take, in steps of the unguarded run.


FLOOR = 0.3
"""Seconds that are always allowed: where steps are short, six of them are next to nothing."""


class OutOfTimeError(Exception):
    """The next replay does not fit into the budget."""


class LocateBudget:
    """The budget of one guard's incidents, and which searches were in vain in earlier ones."""

    def __init__(self, steps: float = 6.0, clock: Callable[[], float] | None = None) -> None:
        self.steps = steps
        self.tracing = False
        """The loop runs under the tracer, so its steps take longer than usual."""
        self.added_by_tracing = 0.0
        self.cut: list[str] = []
        """What was left out of the present incident, in sentences."""
        self.whole_only: set[Hashable] = set()
        """Kinds of batches that the user's code takes whole or not at all."""
        self.fruitless: Counter[Hashable] = Counter()
        """Searches in a row, by place, that ended without a sample."""
        # Steps whose times stand for an unguarded step
        self.recent: deque[float] = deque(maxlen=16)
        """Seconds of the last steps of the loop, without those that were traced."""
        self._clock = clock or time.perf_counter
        self._began = 0.0
        self._traced: float | None = None

    def took_traced(self, seconds: float) -> None:
        """Note how long a step took that ran under the tracer."""
        self.added_by_tracing += max(seconds - self.bare_seconds, 0.0)

    @property
    def bare_seconds(self) -> float:
        """Seconds of an unguarded step; 0 if unknown."""
        known = [median(self.recent)] if self.recent else []
        # The traced step does the same and more, so it is an upper bound.
        if self._traced is not None:
            known.append(self._traced)
        return min(known, default=0.0)

    def begin(self, step: Step) -> None:
        """Start a new incident."""
        on_host = all(p.device.type == "cpu" for p in step.model.parameters())
        if on_host and self._clock is time.perf_counter:
            # The time of this thread counts, so that a busy machine changes no answer. Where a
            # device computes, the thread only waits.
            self._clock = time.thread_time
        self._began = self._clock()
        self._traced = None
        self.cut = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Leave the first run out of the budget: without it nothing is known at all."""
        began = self._clock()
        yield
        took = self._clock() - began
        if self._traced is None:
            self._traced = took
            self._began += took

    def affords(self, steps: float) -> bool:
        """True if there is time for this many more runs of the step."""
        limit = max(FLOOR, self.steps * self.bare_seconds)
        return self._clock() - self._began + steps * self.bare_seconds <= limit

    def leave_out(self, what: str) -> None:
        """Say what the budget did not allow."""
        self.cut.append(
            f"cut short: {what} would take more than {self.steps:g} unguarded steps (locate_budget)"
        )


# --- State of a loss function's own: generators, counters, lists, tensors outside batch and
# modules. A replay cannot put back what was never remembered, so a loss function with such state
# may give another answer the second time. It is collected only once a step is bad. State of modules
# is remembered before the step.


MOST_VALUES = 2000
"""Values that are collected; a data set in a closure must not take minutes."""
DEEPEST = 4
HARMLESS_THREADS = ("stepguard", "TMonitor", "tqdm")
"""Threads that change no state of the user's: stepguard's own and a progress bar's clock."""


class LossFunctionState:
    """Everything a function reaches by its closure, defaults, bound object and named globals."""

    def __init__(self, function: Any) -> None:
        self._seen: set[int] = set()
        self._kept: list[tuple[str, KeptLeaf | KeptTensor]] = []
        self._collect(type(function).__name__, function, -1)

    def changed(self) -> tuple[str, ...]:
        """Name what is no longer as it was found, in words."""
        return tuple(dict.fromkeys(words for words, kept in self._kept if kept.moved(set())))

    def restore(self) -> None:
        """Put everything back as it was found, unless other threads may have changed it."""
        for thread in threading.enumerate():
            kind = type(thread).__name__
            harmless = thread.name.startswith(HARMLESS_THREADS) or kind in HARMLESS_THREADS
            if thread is not threading.current_thread() and not harmless:
                # What changed may be its: a prefetched batch for instance.
                return
        for _, kept in self._kept:
            kept.restore(set())

    def _collect(self, name: str, value: Any, depth: int, owner: Any = None, key: Any = 0) -> None:
        """`owner`: what holds the value under `key`; None where it cannot be replaced."""
        if depth > DEEPEST or len(self._kept) >= MOST_VALUES:
            return
        if type(value) in (int, float):
            if owner is not None:
                self._kept.append((f"the number `{name}`", _keep_place(owner, key, value)))
            return
        if id(value) in self._seen or isinstance(value, nn.Module | nn.Parameter | type):
            return
        self._seen.add(id(value))
        generator = keep_generator(value)
        if isinstance(value, Tensor):
            # An inference tensor has no version counter.
            # Elements of a tensor up to which it is copied
            if owner is not None and value.numel() <= 1_000_000 and not value.is_inference():
                words = f"the tensor `{name}`"
                self._kept.append((words, KeptTensor(value)))
                self._kept.append((words, _keep_place(owner, key, value)))
        elif generator is not None:
            kind = "counter" if isinstance(value, itertools.count) else "generator"
            self._kept.append((f"the {kind} `{name}`", generator))
        else:
            self._collect_inside(name, value, depth)

    def _collect_inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            for inner, item in list(value.items()):
                self._collect(f"{name}[{inner!r}]", item, depth + 1, value, inner)
        elif isinstance(value, list | deque):
            self._kept.append((f"the list `{name}`", _keep_list(value)))
            for position, item in enumerate(itertools.islice(value, MOST_VALUES)):
                self._collect(f"{name}[{position}]", item, depth + 1, value, position)
        elif isinstance(value, functools.partial):
            self._collect(name, value.func, depth)
            for inner, item in (*enumerate(value.args), *value.keywords.items()):
                self._collect(f"argument {inner}", item, depth)
        elif isinstance(value, MethodType):
            self._collect("self", value.__self__, depth)
            self._collect(name, value.__func__, depth)
        elif isinstance(value, FunctionType):
            self._collect_reached(value, depth)
        elif hasattr(value, "__dict__"):
            # An instance of a class of the user's own program, not of a library.
            file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
            if file and is_users(file) and "site-packages" not in file:
                for inner, item in list(vars(value).items()):
                    self._collect(f"{name}.{inner}", item, depth + 1, vars(value), inner)

    def _collect_reached(self, function: FunctionType, depth: int) -> None:
        """What the code of the function can name without importing or being handed it."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            # The variable of the enclosing function may not be assigned yet.
            with suppress(ValueError):
                self._collect(name, cell.cell_contents, depth + 1, cell)
        for position, value in enumerate(function.__defaults__ or ()):
            self._collect(f"default {position}", value, depth + 1)
        if is_users(code.co_filename):
            space = function.__globals__
            for name in code.co_names:
                if name in space:
                    self._collect(name, space[name], depth + 1, space, name)


def _keep_place(owner: Any, key: Any, value: Any) -> KeptLeaf:
    """Remember the number or the very tensor in a variable, an attribute or an item of `owner`."""

    cell = isinstance(owner, CellType)

    def present(owner: Any) -> str | int:
        now = None
        with suppress(LookupError):
            now = owner.cell_contents if cell else owner[key]
        # As text: a NaN differs from itself, but NaN before and after is not a change.
        return id(now) if isinstance(now, Tensor) else repr(now)

    def put_back(owner: Any, saved: str | int) -> None:
        if cell:
            owner.cell_contents = value
        elif isinstance(owner, dict) or key < len(owner):
            owner[key] = value

    return KeptLeaf(owner, present, put_back)


def _keep_list(value: list[Any] | deque[Any]) -> KeptLeaf:
    items = list(value)

    def drop_appended(live: Any, saved: object) -> None:
        # Only what was appended is taken away: a list that changed in another way may be shared.
        if isinstance(live, list) and all(map(is_, live, items)):
            del live[len(items) :]

    return KeptLeaf(
        value,
        # Entries of a list above which only their number is compared
        lambda live: len(live) if len(live) > 100_000 else [id(item) for item in live],
        drop_appended,
    )


@contextmanager
def kept_loss_function_state(step: Step) -> Iterator[LossFunctionState]:
    """Remember the loss function's own state and put it back: replays must not use it up."""
    own = LossFunctionState(step.loss_fn)
    try:
        yield own
    finally:
        own.restore()


# --- Run one micro-batch of the bad step again: same RNG, buffers, batch and loss scale.


class ReplayError(Exception):
    """The user's code raised an exception in a replay; the cause is chained."""

    op: str | None = None
    """The operation that raised, where it was traced."""


@contextmanager
def replaying(step: Step, budget: LocateBudget | None = None) -> Iterator[Replayer]:
    """Run the step again as often as needed inside; everything ends as it began."""
    kind = ModelReplayer if step.model_only else Replayer
    with untouched(step) as keeper, kept_loss_function_state(step) as own:
        yield kind(step, keeper, own, budget)


class Replayer:
    """Runs micro-batches of one step, see `replaying`."""

    def __init__(
        self,
        step: Step,
        keeper: BufferKeeper,
        loss_fn_state: LossFunctionState | None = None,
        budget: LocateBudget | None = None,
    ) -> None:
        self.step = step
        self.loss_fn_state = loss_fn_state
        """State of the loss function's own: put back before every run, so that all are alike."""
        self.first_traced: Ran | None = None
        """Result of the first trace, before anything in the batch was repaired."""
        self.budget = budget if budget is not None else LocateBudget()
        self.keeper = keeper
        """Buffers to put back before every run."""
        self.any_gradient = False
        """Run the backward also where the loss, or what came back to the model, is bad."""
        roots = step.named_roots()
        self.parameters = dict(named_parameters(roots))
        self.buffers = dict(named_buffers(roots))

    def run(
        self, micro: int, batch: Any = None, *, backward: bool = True, eager: bool = True
    ) -> Ran:
        """Run without a trace. `batch` replaces the recorded one. Gradients are accumulated."""
        # Compiled code runs as written: a trace needs every operation.
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            return self._run(micro, self._copied(micro, batch), backward, None)

    def trace(
        self,
        micro: int,
        batch: Any = None,
        *,
        backward: bool = True,
        reach: bool = False,
        last: int | None = None,
    ) -> Tracer:
        """Run with a trace of every operation. The backward of a bad loss is left out.

        `reach`: measure magnitudes too. `last`: number of the operation to stop after.
        """
        roots = self.step.named_roots()
        spans = ModuleSpans(roots)
        tracer = Tracer(spans)
        tracer.micro_batch = micro
        tracer.measures_reach = reach
        tracer.last = last
        copied = self._copied(micro, batch)
        # A tensor can be reached by several names. The last one counts: a parameter that a module
        # keeps in a list as well is that parameter.
        for name, tensor in (*kept_tensors(roots), *batch_tensors(copied)):
            tracer.store(name, tensor)
        for name, parameter in self.parameters.items():
            tracer.store(f"param:{name}", parameter)
            if parameter.grad is not None:
                tracer.store(f"grad:{name}", parameter.grad)
        for name, buffer in self.buffers.items():
            tracer.store(f"buffer:{name}", buffer)
        eager = torch.compiler.set_stance("force_eager")
        with self.budget.first_run(), eager, spans:
            tracer.ran = self._run(micro, copied, backward, tracer)
        self.first_traced = self.first_traced or tracer.ran
        return tracer

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def copied_gradients(self) -> dict[str, Tensor]:
        """Copy the present gradients, by the name of the parameter."""
        copies = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                copies[name] = parameter.grad.clone()
        return copies

    def bad_gradients(self) -> list[str]:
        """Name the parameters whose gradient holds a NaN or Inf."""
        bad = []
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is not None and numeric(grad) and not is_finite(grad):
                bad.append(name)
        return bad

    def _copied(self, micro: int, batch: Any) -> Any:
        """Copy every tensor: a loss function may change its batch or collect gradients in it."""
        if batch is None:
            batch = self.step.micro_batches[micro]
        return rebuild(batch, lambda _, t: t.detach().clone().requires_grad_(t.requires_grad))

    def _run(self, micro: int, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        # Put back what a run may have changed, except for gradients.
        self.keeper.restore()
        if self.loss_fn_state is not None:
            self.loss_fn_state.restore()
        restore_rng(self.step.rng[min(micro, len(self.step.rng) - 1)])
        backward = backward and self._goes_back(micro)
        try:
            ran = self._passes(batch, backward, tracer)
        except Exception as error:
            failure = ReplayError(f"{type(error).__name__}: {error}")
            failure.op = None if tracer is None else tracer.raised_in
            raise failure from error
        if backward and ran.loss_finite:
            ran.bad_gradients = tuple(self.bad_gradients())
        return ran

    def _goes_back(self, micro: int) -> bool:
        return True

    def _passes(self, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        """Run the forward pass and, where the loss is finite, the backward pass."""
        assert self.step.loss_fn is not None
        with tracing(tracer, "forward"):
            given = self.step.loss_fn(batch)
            loss = total_loss(given)
        parts: dict[str, float] = {}
        if isinstance(given, Mapping):
            parts = {str(name): float(part.detach()) for name, part in given.items()}
        ran = Ran(loss_finite=is_finite(loss), loss=loss.detach(), parts=parts)
        if backward and (self.any_gradient or (ran.loss_finite and loss.requires_grad)):
            with tracing(tracer, "backward"):
                if self.step.scale != 1.0:
                    loss = loss * self.step.scale
                # Not loss.backward(), which a watching guard would take for the loop's.
                torch.autograd.backward(loss)
        return ran


def tracing(tracer: Tracer | None, stage: Stage) -> Any:
    """Return a context in which operations are traced, if there is a tracer.

    Only the user's code runs inside: tests of the guard's own are not part of the step.
    """
    if tracer is None:
        return nullcontext()
    tracer.stage = stage
    return tracer


# --- Replay a watched step, of which only the model's part can be run again.


METHOD = "output-gradient"
OUTSIDE_FORWARD = (
    "originated outside the model: replayed, its outputs are finite; the loss expression was "
    "not observed"
)
OUTSIDE_BACKWARD = (
    "originated outside the model: the gradient that came back to its outputs is bad already; "
    "the loss expression was not observed"
)
OUTSIDE_BOTH = (
    "the replayed model gives finite gradients, so the bad one took another path: a parameter used "
    "outside the model's forward, a hook, or something transient"
)
CAME_IN = (
    "the bad value entered the model through an argument that was computed before the "
    "call; that part was not observed"
)


class ModelReplayer(Replayer):
    """Runs the recorded calls of the model; `Ran.loss` is the first bad output, or the first."""

    def bad_call(self) -> int | None:
        """Return the first call whose outputs, or else whose gradients, are bad when run again."""
        for backward in (False, True):
            for call in range(len(self.step.micro_batches)):
                self.clear_gradients()
                clean = self.run(call, backward=backward).clean
                self.clear_gradients()
                if not clean:
                    return call
        return None

    def with_caller(self, origin: Origin, call: int | None) -> Origin:
        """Add what a full replay knows from the user's frames: the line that called the model."""
        if call is None or origin.phase not in ("input", "forward", "backward"):
            return origin
        argument = dict(batch_tensors(self.step.micro_batches[call])).get(origin.tensor or "")
        if origin.phase == "input" and argument is not None and argument.grad_fn is not None:
            # Not data, but the result of operations.
            return replace(
                origin,
                phase="forward",
                tensor=None,
                module=None,
                op=None,
                reproduced=None,
                remarks=(*origin.remarks, CAME_IN),
            )
        recorded = self.step.lines[call] if call < len(self.step.lines) else None
        if origin.source is not None or recorded is None:
            return origin
        return with_source(origin, Line(*recorded))

    def outside_model(self, reading: Reading) -> Origin:
        """Say where the bad value was not made, when the model's part is clean."""
        if reading.bad_state and not reading.state_born:
            return evidence.state_origin(self.step, reading)
        origin = Origin(
            step=reading.step,
            phase="backward",
            micro_batch=evidence.first_bad_micro_batch(reading),
            method=METHOD,
        )
        if evidence.loss_is_bad(reading):
            origin = replace(origin, phase="loss", remarks=(OUTSIDE_FORWARD,))
            return read_origin(origin, self.step.expressions, loss=reading.loss)
        if gradients_came_back_finite(self.step):
            return replace(origin, remarks=(OUTSIDE_BOTH,))
        origin = replace(origin, remarks=(OUTSIDE_BACKWARD,))
        return read_origin(origin, self.step.expressions, loss=None)

    def _goes_back(self, micro: int) -> bool:
        return self.any_gradient or came_back_finite(self.step.micro_batches[micro])

    def _passes(self, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        assert self.step.model_fn is not None
        with tracing(tracer, "forward"):
            outputs, gradients = self.step.model_fn(batch)
        bad = [output for output in outputs if not is_finite(output)]
        # Start the backward at the outputs that the loss sent a gradient to.
        reached: list[Tensor] = []
        received: list[Tensor] = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and backward and not bad:
                reached.append(output)
                # Ones where what came back is bad and the backward is asked for all the same.
                received.append(gradient if is_finite(gradient) else torch.ones_like(gradient))
        if reached:
            with tracing(tracer, "backward"):
                torch.autograd.backward(reached, received)
        first = next(iter(bad or outputs), None)
        return Ran(loss_finite=not bad, loss=None if first is None else first.detach())


# --- Compare the fault of a replay with the fault that was seen: NaN, +inf and -inf are
# different.


def kind(value: float) -> str:
    """`nan`, `+inf`, `-inf` or `finite`."""
    return "finite" if math.isfinite(value) else f"{value:+}".replace("+nan", "nan")


def difference(reading: Reading, micro: int, replayer: Replayer) -> str | None:
    """Say in which way the replayed micro-batch goes bad differently; None if it agrees."""
    ran = replayer.first_traced
    if ran is None or replayer.step.model_only:
        return None
    pairs: list[tuple[str, float, float]] = []
    if micro < len(reading.micro_losses) and ran.loss is not None:
        pairs.append(("the loss", reading.micro_losses[micro], float(ran.loss)))
    # The parts in a reading are sums over the micro-batches.
    for name, value in reading.components.items() if len(reading.micro_losses) == 1 else ():
        pairs.append((f"the loss part {name!r}", value, ran.parts.get(name, value)))
    for what, seen, given in pairs:
        if kind(seen) != kind(given):
            return f"{what} was {kind(seen)} and the replay gives {kind(given)}"
    # A replay leaves out the backward of a bad loss, so it may name no gradient at all.
    was = reading.bad_grads
    now = ran.bad_gradients
    if now and was and not set(now) & set(was):
        return f"the gradient of {was[0]} was non-finite and the replay breaks that of {now[0]}"
    return None

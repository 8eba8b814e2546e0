"""When a guard takes a deep look at a step, and what the step's driver tells it on the way."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from stepguard.engine.context import Context, StepProbe, guarded
from stepguard.engine.drivers.schedule import needs_closure
from stepguard.engine.protect import Protection
from stepguard.probes.deep_look import DeepLook
from stepguard.probes.silent import ForecastCheck, HostFacts, LookSchedule, SilentCheck
from stepguard.probes.statistics import SeenBatch, digest_of
from stepguard.records import Reading
from stepguard.records.probes import Look, NextBatch
from stepguard.tensors.names import optimizer_parameter_ids
from stepguard.tensors.torch_private import dispatch_mode_stack, graphs_compiled, tree_flatten

PART = "deep look"
CLOSURE = "the optimizer calls a closure"
AVERAGES = ("ema", "average", "averaging", "swa", "shadow", "polyak")
"""Words by which people call an average of weights."""


class Looks(StepProbe):
    """Deep looks, silent failures and forecasts of one guard.

    A fault in here costs the look, never the step.
    """

    def __init__(self, context: Context, protect: Protection) -> None:
        self._context = context
        self._protect = protect
        self.schedule = LookSchedule(context.config.probes.look_every)
        self._host_facts = HostFacts(context)
        self._silent = SilentCheck(context, self._host_facts)
        self._forecast = ForecastCheck(context, self.schedule)
        self._running: DeepLook | None = None
        self._left_behind: DeepLook | None = None
        """A look that an optimizer inside the backward pass has ended: no more are taken."""
        self._batches: Counter[str] = Counter()
        self._last_batch: SeenBatch | None = None
        """That of the last look."""
        self._next_batch: SeenBatch | None = None
        """That of the step after it, until that step is over."""
        self._batch_after: NextBatch = "unknown"
        self._outsiders: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensors that get gradients beside model and optimizer, and the number of each."""
        self._counted = itertools.count()
        self._closure = needs_closure(context.optimizer)
        self._said: set[str] = set()
        """What was said already of looks that failed or could not be taken."""
        context.resources.callback(self.close)

    def begin(self) -> None:
        """The next step is about to begin."""
        if self._left_behind is not None:
            self._left_behind.observer.stop()
            return
        if self._running is not None or not self.schedule.due(self._context.step):
            return
        if not self._protect.armed or not torch.is_grad_enabled():
            return  # an evaluation or a rollout, which may be long: no step begins here
        why_not = self._impossible()
        if why_not:
            self._say_why(why_not)
            return
        with self._protect.part(PART):
            context = self._context
            owned: set[int] = set()
            for optimizer in [*guarded, context.optimizer]:
                owned |= optimizer_parameter_ids(optimizer)
            look = DeepLook(context.step, context.roots, context.optimizer, owned)
            self._running = look
            look.begin()

    def _impossible(self) -> str:
        """Why no look can be taken of this step; empty if one can."""
        context = self._context
        if context.agreement.world_rank != 0:
            return "rank 0 takes the looks"
        if context.sharded:
            return "the model is sharded"
        # Two modes would see each other's work.
        if dispatch_mode_stack():
            return "another dispatch mode is active (a tracer, a FLOP counter)"
        if graphs_compiled():
            return "torch.compile has compiled a part of this program"
        return CLOSURE if self._closure else ""

    def _say_why(self, why_not: str) -> None:
        """Keep in the journal, once, why no look was taken."""
        if why_not not in self._said:
            self._said.add(why_not)
            fields = {"step": self._context.step, "reason": why_not}
            self._context.outputs.line("no_look", fields)

    def saw_batch(self, batch: Any) -> None:
        """The data of the step."""
        if self._host_facts.sampling() and self._protect.armed:
            with self._protect.part("silent failures"), self.paused():
                self._host_facts.saw_batch(batch)
        if self._next_batch is not None:
            with self._protect.part(PART), self.paused():
                self._next_batch.add(batch)
        if self._running is not None:
            with self._protect.part(PART), self.paused():
                self._running.batch.add(batch)
            with self._protect.part(PART):
                # the model is called again before the update
                if not self._running.observer.on_the_stack:
                    self._running.observer.start()

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass of the loop begins at this loss."""
        if self._running is not None:
            with self._protect.part(PART), self.paused():
                self._running.loss_seen(root)

    def backward_over(self) -> None:
        """A backward pass of the loop is over; others may follow before the update."""
        if self._running is not None:
            with self._protect.part(PART):
                self._running.observer.stop()

    def gradients_ready(self) -> None:
        """Forward and backward are over: what follows is the guard's own work."""
        self.backward_over()

    def before_update(self) -> None:
        """The optimizer steps next."""
        if self._host_facts.sampling() and self._protect.armed:
            with self._protect.part("silent failures"), self.paused():
                self._host_facts.before_update()
        if self._running is not None:
            with self._protect.part(PART):
                self._running.observer.stop()
                self._running.before_update()

    def finish(self, *, committed: bool) -> None:
        """The step is over. A bad one is told elsewhere, and nothing is said of it here."""
        # The step after a look is over: was it given the same batch?
        if self._last_batch is not None and self._next_batch is not None:
            self._batch_after = self._last_batch.compared(self._next_batch)
        self._last_batch = None
        self._next_batch = None
        look = self._running
        if look is None:
            if self._closure:  # its driver announces no steps
                self._say_why(CLOSURE)
            return
        self._running = None
        look.observer.stop()
        if look.observer.on_the_stack:
            self._left_behind = look
            return
        with self._protect.part(PART):
            taken = look.finish(committed=committed)
            self.schedule.took(look.step, taken.seconds)
            fault = look.observer.fault or look.observer.layer_fault
            if fault is not None and "fault" not in self._said:
                self._said.add("fault")
                missing = "nothing" if look.observer.fault is not None else "a part of it"
                self._context.outputs.note(
                    "look",
                    f"the deep look at step {look.step} failed, and {missing} is reported: "
                    f"{type(fault).__name__}: {fault}. Training is not affected",
                    reason=f"a look failed: {type(fault).__name__}: {fault}",
                )
            if committed and look.observer.fault is None and is_finite(taken):
                self._tell(taken, look.outsiders)
            self._last_batch = look.batch
            self._next_batch = SeenBatch()
            return
        # measuring failed, and would fail again at every look
        self.schedule.stop()

    def committed(self, reading: Reading) -> None:
        """The update of a step went through."""
        with self._protect.part("silent failures"):
            self._silent.committed(reading)
        self.skipped(reading)

    def skipped(self, reading: Reading) -> None:
        """A GradScaler skipped the update."""
        with self._protect.part("forecast"):
            self._forecast.read(reading)

    def run_ended(self) -> None:
        """No error has cut the run short."""
        with self._protect.part("silent failures"):
            self._silent.run_ended()

    def _tell(self, look: Look, outsiders: list[Tensor]) -> None:
        # Digests of those further objects that look like an average of the weights.
        shapes = {parameter.shape for parameter in self._context.parameters}
        averages = {}
        for name, thing in self._context.extra.items():
            if not is_average(name, thing):
                continue
            tensors = [value for value in tensors_held(thing) if value.shape in shapes]
            if 2 * len(tensors) >= len(shapes):
                averages[name] = digest_of(tensors)
        # What they are, by number and version: who updates one gives it another version.
        numbered = {}
        for one in outsiders:
            if one not in self._outsiders:
                self._outsiders[one] = next(self._counted)
            number = self._outsiders[one]
            kind = "Parameter" if isinstance(one, nn.Parameter) else "tensor with requires_grad"
            numbered[f"{number}.{one._version}"] = f"a {kind} of shape {list(one.shape)}"
        facts = replace(
            look.facts,
            averages=averages,
            batch_after=self._batch_after,
            outsiders=numbered,
        )
        if facts.batch:
            facts = replace(facts, repeats=self._batches[facts.batch])
            self._batches[facts.batch] += 1
        look = replace(look, facts=facts)
        self._context.outputs.look(look)
        self._silent.looked(look)
        self._forecast.looked(look)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work of the guard's own in the middle of the user's step."""
        look = self._running
        if look is None:
            yield
            return
        look.observer.paused = True
        try:
            yield
        finally:
            look.observer.paused = False

    def close(self) -> None:
        """End a look that is under way, without a record."""
        for look in (self._running, self._left_behind):
            if look is not None:
                look.observer.stop()
        self._running = None


def is_finite(look: Look) -> bool:
    """False where the step was a bad one after all: a fused update is judged later."""
    return all(math.isfinite(one.weight + (one.update or 0.0)) for one in look.parameters)


def is_average(name: str, thing: Any) -> bool:
    """Told by its type or by what it is called: a frozen teacher looks the same, and stays."""
    if isinstance(thing, AveragedModel):
        return True
    called = f"{name} {type(thing).__name__}".lower()
    return any(word in called for word in AVERAGES)


def tensors_held(thing: Any) -> list[Tensor]:
    """Tensors of a module, or in the attributes of another object: in lists and dicts as well.

    Nothing of the object is called: its `state_dict` is the user's code.
    """
    if isinstance(thing, nn.Module):
        return list(thing.parameters())
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return [leaf for leaf in tree_flatten(dict(attributes))[0] if isinstance(leaf, Tensor)]

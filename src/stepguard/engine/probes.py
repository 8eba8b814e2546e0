"""When a guard takes a deep look at a step, and what the step's driver tells it on the way."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from stepguard.diagnose.engine import forecasts, silent_findings, trend_begins
from stepguard.engine.context import Context, guarded
from stepguard.engine.drivers.schedule import needs_closure, position, wants_a_value
from stepguard.engine.protect import Protection
from stepguard.look.deep_look import DeepLook
from stepguard.look.statistics import SeenBatch, digest_of
from stepguard.records import Finding, Reading
from stepguard.records.probes import Forecast, Look, NextBatch
from stepguard.tensors.names import optimizer_parameter_ids
from stepguard.tensors.torch_private import (
    dispatch_mode_stack,
    graphs_compiled,
    tree_flatten,
)

# --- When a guard takes a deep look at a step, and what the step's driver tells it on the way.


SHARE = 0.001
"""Share of the run's time that looks may take, after the first minutes."""
SAVED = 0.0005
"""Part of that share that is saved for the time when a trend begins to show."""
EARLY_SHARE = 0.01
EARLY_SECONDS = 300.0
"""In the first minutes a look is worth more: what is wrong with a setup is wrong from the start."""
LEAST_SECONDS = 120.0
"""A run is expected to last at least this long, so its first looks need not wait for the time."""
GROWTH = 0.05
"""A look is at least this share of all steps so far after the last one: ever more rarely."""
EARLY_GAPS = ((64, 5), (256, 16))
"""Up to which step looks are at most how far apart; after that at powers of two."""
HURRY_STEPS = 4
"""Steps between two looks while a trend shows."""
FIRST = 2
"""Step of the first look: what torch.compile compiles has been compiled by then, and is left alone.
"""
PART = "deep look"
CLOSURE = "the optimizer calls a closure"
AVERAGES = ("ema", "average", "averaging", "swa", "shadow", "polyak")
"""Words by which people call an average of weights."""


class LookSchedule:
    """Says at which steps a look is due."""

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every = every
        self._clock = clock
        self._began: float | None = None
        self._spent = 0.0
        self._cost = 0.0
        """Of the last look."""
        self._last: int | None = None
        """The step of the last look."""
        self._offset: int | None = None
        """The first step that was asked for."""
        self.hurry = False
        """A trend begins to show: spend what was saved for this."""
        self._asked = 0.0
        """When the schedule was last asked: that is once a step."""
        self._usual = 0.0
        """Time of the newest step without a look."""
        self._unsettled = False
        """The last look has cost what it says, and perhaps more."""

    def due(self, step: int) -> bool:
        """True if this step is to be looked at."""
        if self._every is None:
            return False
        if self._began is None:
            self._began = self._clock()
        self._settle()
        if self._last is None:
            # counted from where this process began: a restored run compiles again
            self._offset = step if self._offset is None else self._offset
            return step >= self._offset + FIRST
        if self._every != "auto":
            return step - self._last >= self._every
        elapsed = self._clock() - self._began
        early = EARLY_SHARE * min(max(elapsed, LEAST_SECONDS), EARLY_SECONDS)
        allowed = early + SHARE * max(0.0, elapsed - EARLY_SECONDS)
        offset = self._offset or 0
        if self.hurry:
            wanted = step - self._last >= HURRY_STEPS
        else:
            # ever more rarely; between these what the long run's share allows
            age = self._last - offset
            gap = next((gap for until, gap in EARLY_GAPS if age < until), age)
            wanted = step - self._last >= min(gap, age)
            if not wanted and step >= self._last + max(1.0, GROWTH * step):
                wanted = True
                allowed = (SHARE - SAVED) * elapsed
        return wanted and self._spent + self._cost <= allowed

    def _settle(self) -> None:
        """Charge a look with what its step took beyond the usual, which it sees only a part of.

        At most as much again: a validation after the step is not the look's.
        """
        now = self._clock()
        took = now - self._asked
        self._asked = now
        if not self._unsettled:
            self._usual = took
            return
        self._unsettled = False
        unseen = min(max(0.0, took - self._usual - self._cost), self._cost)
        self._spent += unseen
        self._cost += unseen

    def stop(self) -> None:
        """No further look."""
        self._every = None

    def took(self, step: int, seconds: float) -> None:
        """A look has been taken."""
        # the first one is always allowed: what it tells of the setup comes too late otherwise
        if self._last is not None:
            self._spent += seconds
        self._last = step
        self._cost = seconds
        self._unsettled = True


class Looks:
    """The deep looks of one guard. A fault in here costs the look, never the step."""

    def __init__(self, context: Context, protect: Protection) -> None:
        self._context = context
        self._protect = protect
        self.schedule = LookSchedule(context.config.probes.look_every)
        self.heard: list[Callable[[Look], None]] = []
        """Who is told of every look."""
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
            self._left_behind.abandon()
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

    @contextmanager
    def during(self, batch: Any) -> Iterator[None]:
        """Around forward and backward of a step that the guard runs."""
        self.begin()
        self.saw_batch(batch)
        try:
            yield
        except BaseException:
            self.close()
            raise
        self.gradients_ready()

    def saw_batch(self, batch: Any) -> None:
        """The data of the step."""
        if self._next_batch is not None:
            with self._protect.part(PART), self.paused():
                self._next_batch.add(batch)
        if self._running is not None:
            with self._protect.part(PART), self.paused():
                self._running.saw_batch(batch)
            with self._protect.part(PART):
                self._running.resume()

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass of the loop begins at this loss."""
        if self._running is not None:
            with self._protect.part(PART), self.paused():
                self._running.loss_seen(root)

    def backward_over(self) -> None:
        """A backward pass of the loop is over; others may follow before the update."""
        if self._running is not None:
            with self._protect.part(PART):
                self._running.suspend()

    def gradients_ready(self) -> None:
        """Forward and backward are over: what follows is the guard's own work."""
        if self._running is not None:
            with self._protect.part(PART):
                self._running.gradients_ready()

    def before_update(self) -> None:
        """The optimizer steps next."""
        if self._running is not None:
            with self._protect.part(PART):
                self._running.gradients_ready()
                self._running.before_update()

    def finish(self, *, committed: bool) -> None:
        """The step is over. A bad one is told elsewhere, and nothing is said of it here."""
        self._compare_batches()
        look = self._running
        if look is None:
            if self._closure:  # its driver announces no steps
                self._say_why(CLOSURE)
            return
        self._running = None
        if not look.abandon():
            self._left_behind = look
            return
        with self._protect.part(PART):
            taken = look.finish(committed=committed)
            self.schedule.took(look.step, taken.seconds)
            fault = look.fault or look.layer_fault
            if fault is not None and "fault" not in self._said:
                self._said.add("fault")
                missing = "nothing" if look.fault is not None else "a part of it"
                self._context.outputs.note(
                    "look",
                    f"the deep look at step {look.step} failed, and {missing} is reported: "
                    f"{type(fault).__name__}: {fault}. Training is not affected",
                    reason=f"a look failed: {type(fault).__name__}: {fault}",
                )
            if committed and look.fault is None and is_finite(taken):
                self._tell(taken, look.outsiders)
            self._last_batch = look.batch
            self._next_batch = SeenBatch()
            return
        # measuring failed, and would fail again at every look
        self.schedule.stop()

    def _compare_batches(self) -> None:
        """The step after a look is over: was it given the same batch?"""
        if self._last_batch is not None and self._next_batch is not None:
            self._batch_after = self._last_batch.compared(self._next_batch)
        self._last_batch = None
        self._next_batch = None

    def _tell(self, look: Look, outsiders: list[Tensor]) -> None:
        facts = replace(
            look.facts,
            averages=self._averages(),
            batch_after=self._batch_after,
            outsiders=self._numbered(outsiders),
        )
        if facts.batch:
            facts = replace(facts, repeats=self._batches[facts.batch])
            self._batches[facts.batch] += 1
        look = replace(look, facts=facts)
        self._context.outputs.look(look)
        for tell in self.heard:
            tell(look)

    def _numbered(self, outsiders: list[Tensor]) -> dict[str, str]:
        """What they are, by number and version: who updates one gives it another version."""
        found = {}
        for one in outsiders:
            if one not in self._outsiders:
                self._outsiders[one] = next(self._counted)
            number = self._outsiders[one]
            kind = "Parameter" if isinstance(one, nn.Parameter) else "tensor with requires_grad"
            found[f"{number}.{one._version}"] = f"a {kind} of shape {list(one.shape)}"
        return found

    def _averages(self) -> dict[str, str]:
        """Digests of those further objects that look like an average of the weights."""
        shapes = {parameter.shape for parameter in self._context.parameters}
        found = {}
        for name, thing in self._context.extra.items():
            if not is_average(name, thing):
                continue
            tensors = [value for value in tensors_held(thing) if value.shape in shapes]
            if 2 * len(tensors) >= len(shapes):
                found[name] = digest_of(tensors)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work of the guard's own in the middle of the user's step."""
        look = self._running
        if look is None:
            yield
            return
        look.pause(on=True)
        try:
            yield
        finally:
            look.pause(on=False)

    def close(self) -> None:
        """End a look that is under way, without a record."""
        for look in (self._running, self._left_behind):
            if look is not None:
                look.abandon()
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


# --- Tell what a healthy run is heading for: every clear trend once, as a line.


MOST_READINGS = 64
MOST_FORECAST_LOOKS = 64
MOST_SCALES = 32
"""Changes of the loss scale that are kept, however long ago."""
QUICK = 6
"""Steps over which the loss is compared at every step."""
GREW = 2.0
"""Growth of the loss over these steps that is worth a closer check."""
OFTEN = 8
"""Steps between two comparisons with everything that is remembered: slow growth shows there."""


class ForecastCheck:
    """Keeps the history that the rules on coming trouble need, and tells each trend once."""

    def __init__(self, context: Context, schedule: LookSchedule) -> None:
        self._context = context
        self._schedule = schedule
        self._looks: deque[Look] = deque(maxlen=MOST_FORECAST_LOOKS)
        self._recent: deque[Reading] = deque(maxlen=MOST_READINGS)
        self._scales: deque[Reading] = deque(maxlen=MOST_SCALES)
        self._at_looks: deque[Reading] = deque(maxlen=MOST_FORECAST_LOOKS)
        """The step before each look, however long ago."""
        self._told: dict[str, int] = {}
        """Code -> last step of the interval that was told."""

    def read(self, reading: Reading) -> None:
        """A step went through, or a GradScaler skipped it."""
        if self._recent and reading.step < self._recent[-1].step:
            self._forget(reading.step)
        scale_changed = self._add(reading)
        if scale_changed or self._loss_grows():
            self._check()

    def looked(self, look: Look) -> None:
        """A deep look was taken."""
        self._looks.append(look)
        if self._recent:
            self._at_looks.append(self._recent[-1])
        self._check()

    def _add(self, reading: Reading) -> bool:
        before = self._recent[-1].scale if self._recent else None
        changed = reading.scale is not None and reading.scale != before
        if changed:
            # the last step of a scale says whether it worked
            if before is not None:
                self._scales.append(self._recent[-1])
            self._scales.append(reading)
        self._recent.append(reading)
        return changed

    def _loss_grows(self) -> bool:
        if len(self._recent) < QUICK:
            return False
        newest = self._recent[-1]
        now = newest.loss
        before = self._recent[-QUICK].loss
        if now is None or before is None:
            return False
        if newest.step % OFTEN == 0:
            before = min(abs(one.loss) for one in self._recent if one.loss is not None)
        return abs(now) > GREW * abs(before)

    def _forget(self, step: int) -> None:
        """The run went back: what came after this step did not happen."""
        self._looks = deque((one for one in self._looks if one.step < step), MOST_FORECAST_LOOKS)
        self._recent = deque((one for one in self._recent if one.step < step), MOST_READINGS)
        self._at_looks = deque(
            (one for one in self._at_looks if one.step < step), MOST_FORECAST_LOOKS
        )
        self._scales = deque((one for one in self._scales if one.step < step), MOST_SCALES)

    def _check(self) -> None:
        recent = self._history()
        for finding, forecast in forecasts(self._looks, recent):
            if forecast.now > self._told.get(finding.code, -1):
                self._told[finding.code] = forecast.latest
                self._tell(finding, forecast)
        self._schedule.hurry = trend_begins(self._looks, recent)

    def _history(self) -> list[Reading]:
        oldest = self._recent[0].step if self._recent else 0
        earlier = {}
        for reading in (*self._scales, *self._at_looks):
            if reading.step < oldest:
                earlier[reading.step] = reading
        return [*(earlier[step] for step in sorted(earlier)), *self._recent]

    def _tell(self, finding: Finding, forecast: Forecast) -> None:
        evidence = "; ".join(finding.evidence)
        now = finding.remedies[0].title
        self._context.outputs.note(
            "forecast",
            f"{finding.code} {finding.title}: {evidence}. What to do now: {now} (stepguard explain "
            f"{finding.code})",
            code=finding.code,
            certainty=finding.certainty,
            forecast=asdict(forecast),
        )


# --- Tell what a healthy run does wrong: every silent failure once, as a line.


EVERY = 64
"""Steps between two checks that need no look."""
MOST_LOOKS = 64
SAME_BATCH = "SG907"
FADED = 1e-4
"""Learning rate, beside the highest of its group, at which nothing moves any more."""


class SilentCheck:
    """Keeps what the rules on healthy runs need, and tells each code once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._looks: deque[Look] = deque(maxlen=MOST_LOOKS)
        self._recent: deque[Reading] = deque(maxlen=EVERY)
        self._told: set[str] = set()
        self._steps = 0
        self._schedule = _place(context.scheduler)
        """Where the schedule stood when the guard was made; None where it cannot be told."""
        self._rates: tuple[float, ...] = ()
        """Learning rates of the newest step."""
        self._highest: tuple[float, ...] = ()
        self._faded_since: int | None = None
        self._first: Reading | None = None
        self._look_is_new = False
        """It is judged with the reading of its step, which comes after it."""

    def committed(self, reading: Reading) -> None:
        """A step went through."""
        self._recent.append(reading)
        self._steps += 1
        self._first = self._first or reading
        if reading.lr != self._rates:
            self._rates_changed(reading)
        if self._look_is_new or self._steps % EVERY == 0:
            self._check()

    def _rates_changed(self, reading: Reading) -> None:
        """Remember the highest rates, and since when the present ones are nothing beside them."""
        before = self._highest
        self._rates = reading.lr
        if len(before) != len(reading.lr):
            before = reading.lr
        self._highest = tuple(map(max, before, reading.lr))
        pairs = zip(reading.lr, self._highest, strict=True)
        if not all(rate < FADED * highest for rate, highest in pairs):
            self._faded_since = None
        elif self._faded_since is None:
            self._faded_since = reading.step

    def looked(self, look: Look) -> None:
        """A deep look was taken."""
        self._looks.append(look)
        self._look_is_new = True

    def run_ended(self) -> None:
        """The run is over, and by itself: only now is late what happens once an epoch."""
        stood = self._schedule is not None and _place(self._context.scheduler) == self._schedule
        self._check(ended=True, schedule_stood_for=self._steps if stood else 0)

    def _check(self, *, ended: bool = False, schedule_stood_for: int = 0) -> None:
        self._look_is_new = False
        first = self._first or Reading(step=0)
        found = silent_findings(
            self._looks,
            self._recent,
            ended=ended,
            schedule_stood_for=schedule_stood_for,
            habits=self._context.memory.habits.counts,
            faded_since=self._faded_since,
            first_norm=first.grad_norm,
            first_loss=abs(first.loss) if first.loss is not None else None,
            shrinks_by=_shrinks_by(self._context.optimizer),
        )
        for finding in found:
            if finding.code not in self._told:
                self._told.add(finding.code)
                samples = self._looks[-1].facts.samples if self._looks else 0
                if finding.code != SAME_BATCH or not _whole_data_set_in_a_batch(samples):
                    self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        text = f"{finding.code} {finding.title}: {'; '.join(finding.evidence)}"
        self._context.outputs.note(
            "silent",
            f"{text} (stepguard explain {finding.code})",
            code=finding.code,
            certainty=finding.certainty,
        )


def _shrinks_by(optimizer: Optimizer) -> float:
    """Learning rate times weight decay, where the decay is not a part of an adapted gradient."""
    largest = 0.0
    with suppress(Exception):  # settings of the user's own optimizer may be anything
        for group in optimizer.param_groups:
            plain = "betas" not in group and "eps" not in group
            if plain or group.get("decoupled_weight_decay") or type(optimizer).__name__ == "AdamW":
                largest = max(largest, float(group["lr"]) * float(group.get("weight_decay", 0.0)))
    return largest


def _whole_data_set_in_a_batch(samples: int) -> bool:
    """Is there a loader with all of its data in a batch of this size? Then it is the same again.

    Looked for once in a run at most, and only where the finding would be reported.
    """
    gc.collect()
    for thing in gc.get_objects():
        # type() and not isinstance: proxies answer isinstance with side effects
        if issubclass(type(thing), DataLoader):
            with suppress(Exception):  # a data set without a length, or of the user's own
                if len(thing) == 1 and len(thing.dataset) == samples:
                    return True
    return False


def _place(scheduler: Any) -> tuple[int, ...] | None:
    """How far a schedule has come that the loop should step; a plateau's may well never move."""
    with suppress(Exception):  # an object of the user's own
        if scheduler is not None and not wants_a_value(scheduler):
            return position(scheduler)
    return None

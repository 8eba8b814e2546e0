"""Silent failures and forecasts of a healthy run, each reported once; when a deep look is due."""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stepguard.diagnose.engine import forecasts, silent_findings, trend_begins
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import position, wants_a_value
from stepguard.probes.deep_look import without_unused_parts
from stepguard.probes.statistics import SeenBatch
from stepguard.records import Finding, Reading
from stepguard.records.probes import Forecast, Look
from stepguard.tensors.names import named_modules, parameter_names
from stepguard.tensors.torch_private import transforming, tree_flatten

# --- At which steps a deep look is due: early ones within the first minutes, then ever fewer.


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
        before = self._recent[-1].scale if self._recent else None
        scale_changed = reading.scale is not None and reading.scale != before
        if scale_changed:
            # the last step of a scale says whether it worked
            if before is not None:
                self._scales.append(self._recent[-1])
            self._scales.append(reading)
        self._recent.append(reading)
        if scale_changed or self._loss_grows():
            self._check()

    def looked(self, look: Look) -> None:
        """A deep look was taken."""
        self._looks.append(look)
        if self._recent:
            self._at_looks.append(self._recent[-1])
        self._check()

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
        oldest = self._recent[0].step if self._recent else 0
        earlier = {}
        for reading in (*self._scales, *self._at_looks):
            if reading.step < oldest:
                earlier[reading.step] = reading
        recent = [*(earlier[step] for step in sorted(earlier)), *self._recent]
        for finding, forecast in forecasts(self._looks, recent):
            if forecast.now > self._told.get(finding.code, -1):
                self._told[finding.code] = forecast.latest
                self._tell(finding, forecast)
        self._schedule.hurry = trend_begins(self._looks, recent)

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


# --- What is known of a run without a look: is it given one batch again and again, and which
# parameters of its optimizer are never trained?


MARKED = 16
"""Elements of a tensor on the CPU that are compared with those of the batch before."""
MOST_CALLS = 16
SAME_IN_A_ROW = 7
"""Sampled steps after which equal marks are compared with care."""
STILL_FROZEN, STILL_UNREACHED = 60, 90
"""Steps over which a parameter had `requires_grad=False`, or no gradient."""


class HostFacts:
    """Facts that cost no device read, taken at pairs of steps ever further apart.

    Pairs, because an epoch may be as long as a gap; unequal gaps, because a loop may take turns.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pair = -3
        self._gap = 3
        self.same_batch = 0
        """Step up to which the batches were the same, each time in new memory; 0: they differ."""
        self.samples = 0
        """In such a batch."""
        self._marks: tuple[int, list[Any]] = (-1, [])
        """Of the step at hand."""
        self._last_marks: list[Any] = []
        self._equal = 0
        """Sampled steps in a row with these marks."""
        self._exact: list[tuple[int, SeenBatch]] = []
        """A pair of steps that is compared with care; once in a run."""
        self._parameters: list[Tensor] = []
        self._first = 0
        """The sampled step that this list of parameters was first seen at."""
        self._newest = 0
        self._frozen: list[Tensor] = []
        self._unreached: list[Tensor] = []

    def sampling(self) -> bool:
        """Is the step at hand one of those that are sampled?"""
        step = self._context.step
        if step >= self._pair + self._gap or step < self._pair:
            self._pair = step
            self._gap += 2
        return step - self._pair < 2

    def saw_batch(self, batch: Any) -> None:
        """The data of the step, or a part of it."""
        step = self._context.step
        if len(self._exact) > 2 or not torch.is_grad_enabled() or transforming():
            return
        if self._exact or (self._equal >= SAME_IN_A_ROW and step == self._pair):
            if not self._exact or self._exact[-1][0] != step:
                self._exact.append((step, SeenBatch()))
            self._exact[-1][1].add(batch)
            return
        if self._marks[0] != step:
            self._marks = (step, [])
        if len(self._marks[1]) < MOST_CALLS:
            self._marks[1].append(_mark(batch))

    def before_update(self) -> None:
        """The gradients of the step are there."""
        self._compare_batches()
        parameters = self._context.parameters
        if parameters is not self._parameters:
            self._parameters = parameters
            self._first = self._context.step
            self._frozen = self._unreached = parameters
        self._newest = self._context.step
        self._frozen = [one for one in self._frozen if not one.requires_grad]
        without = [one for one in self._unreached if one.grad is None]
        if len(without) < len(parameters):
            self._unreached = without

    def _compare_batches(self) -> None:
        step = self._context.step
        if len(self._exact) == 2 and not self.same_batch:
            (before, one), (after, other) = self._exact
            self._exact.append(self._exact[-1])  # not again
            if after == before + 1 and one.compared(other) == "equal":
                self.same_batch = after
                self.samples = other.samples
            return
        if self._marks[0] != step or self._exact:
            return
        marks = self._marks[1]
        if not any(values for mark in marks for _, values in mark):
            marks = self._rows_of_loader(step)
        self._equal = self._equal + 1 if marks and marks == self._last_marks else 0
        self._last_marks = marks

    def _rows_of_loader(self, step: int) -> list[Any]:
        """Tensors on a device are not read: the sampler of a DataLoader says what they are."""
        recent = self._context.data.recent
        delivered = recent.of_step(step) if recent is not None else []
        rows = []
        for one in delivered:
            if not isinstance(one.raw, tuple | list) or not all(type(i) is int for i in one.raw):
                return []
            rows.append(list(one.raw))
        return rows

    def frozen(self) -> tuple[str, ...]:
        """Parameters of the optimizer that stay frozen beside others of their module that train.

        A whole module is frozen on purpose, and so is the same part of every module of a kind, or
        what a module of the user's own was made with.
        """
        if self._newest - self._first < STILL_FROZEN or not self._frozen:
            return ()
        roots = self._context.roots
        modules = dict(named_modules(roots))
        still = set(map(id, self._frozen))
        trained = set(map(id, self._parameters)) - still - set(map(id, self._unreached))
        places = []
        training, training_kinds = set(), set()
        for parameter, name in parameter_names(roots, self._context.optimizer):
            prefix, _, leaf = name.rpartition(".")
            kind = (type(modules.get(prefix)), leaf)
            if id(parameter) in still:
                places.append((name, prefix, kind))
            elif id(parameter) in trained:
                training.add(prefix)
                training_kinds.add(kind)
        places = [place for place in places if place[1] in training]
        kinds = Counter(kind for _, _, kind in places)
        found = []
        for name, _, kind in places:
            one_of_torch = kinds[kind] == 1 and kind[0].__module__.startswith("torch.nn.")
            if kind in training_kinds or one_of_torch:
                found.append(name)
        return tuple(found)

    def unreached(self) -> tuple[str, ...]:
        """Trainable parameters that no sampled step has found with a gradient."""
        if self._newest - self._first < STILL_UNREACHED:
            return ()
        ids = {id(one) for one in self._unreached if one.requires_grad}
        pairs = parameter_names(self._context.roots, self._context.optimizer)
        names = tuple(name for one, name in pairs if id(one) in ids)
        return without_unused_parts(self._context.roots, names) if names else ()


def _mark(batch: Any) -> list[tuple[torch.Size, tuple[float, ...]]]:
    """A few elements of every tensor that can be read without waiting; none of a constant one."""
    found = []
    for leaf in tree_flatten(batch)[0]:
        if type(leaf) is not Tensor:
            continue
        values: tuple[float, ...] = ()
        if leaf.device.type == "cpu" and leaf.layout is torch.strided and leaf.is_contiguous():
            stride = max(1, leaf.numel() // MARKED)
            values = tuple(leaf.detach().view(-1)[::stride].tolist())
            if len(set(values)) < 2:
                values = ()
        found.append((leaf.shape, values))
    return found


# --- Tell what a healthy run does wrong: every silent failure once, as a line.


EVERY = 64
"""Steps between two checks that need no look."""
MOST_LOOKS = 64
SAME_BATCH = "SG907"
FADED = 1e-4
"""Learning rate, beside the highest of its group, at which nothing moves any more."""


class SilentCheck:
    """Keeps what the rules on healthy runs need, and tells each code once."""

    def __init__(self, context: Context, host_facts: HostFacts) -> None:
        self._context = context
        self._host_facts = host_facts
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
            # Remember the highest rates, and since when the present ones are nothing beside them.
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
        if self._look_is_new or self._steps % EVERY == 0:
            self._check()

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
            same_batch=self._host_facts.same_batch,
            frozen=self._host_facts.frozen(),
            unreached=self._host_facts.unreached(),
        )
        for finding in found:
            if finding.code not in self._told:
                self._told.add(finding.code)
                samples = self._host_facts.samples
                if self._looks:
                    samples = self._looks[-1].facts.samples
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

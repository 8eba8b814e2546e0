"""Health probes of a healthy run, and what they and the readings show: each silent failure and each
forecast is reported once.
"""

from __future__ import annotations

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
from torch.utils.weak import WeakIdKeyDictionary

from stepguard.diagnose.case import WeightFacts
from stepguard.diagnose.engine import forecasts, silent_findings
from stepguard.diagnose.rules.sg950 import trend_begins
from stepguard.engine.context import Context, StepProbe, guarded
from stepguard.engine.drivers.schedule import needs_closure, position, wants_a_value
from stepguard.engine.protect import Protection
from stepguard.probes.audit import Audit
from stepguard.probes.deep_look import DeepLook, without_unused_parts
from stepguard.probes.epochs import Passes, observe_workers
from stepguard.probes.evaluations import EvaluationObserver
from stepguard.probes.first_steps import ResumeCheck, TargetCounts, data_loaders, weight_facts
from stepguard.probes.micro_batches import LossFactors
from stepguard.probes.overlap import Overlap
from stepguard.probes.statistics import SeenBatch, digest_of
from stepguard.records import Finding, Reading
from stepguard.records.probes import AuditFacts, Look, NextBatch
from stepguard.report.phrases import metric_only
from stepguard.state.batch import Step
from stepguard.state.loader import RecentBatches
from stepguard.tensors.names import named_modules, optimizer_parameter_ids, parameter_names
from stepguard.tensors.torch_private import (
    dispatch_mode_stack,
    graphs_compiled,
    tracing_state,
    transforms,
    tree_flatten,
)

# --- At which steps a health probe is due: early ones within the first minutes, then ever fewer.


SHARE = 0.001
"""Share of the run's time that probes may take, after the first minutes; half of it is saved for
the time when a trend begins to show."""
EARLY_SHARE = 0.01
EARLY_SECONDS = 300.0
"""In the first minutes a probe is worth more: a setup that is wrong is wrong from the start."""
LEAST_SECONDS = 120.0
"""A run is expected to last at least this long, so its first probes need not wait for the time."""
EARLY_GAPS = ((64, 5), (256, 16))
"""Up to which step, and the most steps between two probes; after that at powers of two."""
FIRST = 2
"""Step of the first look: what torch.compile compiles has been compiled by then, and is left alone.
"""


class LookSchedule:
    """Says at which steps a probe is due."""

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = every
        """None: no further look."""
        self.hurry = False
        """A trend begins to show: spend what was saved for this."""
        self._clock = clock
        self._begin: tuple[int, float] | None = None
        """The step and the time at which the schedule was first asked: a restored run compiles
        again."""
        self._asked = 0.0
        """When the schedule was last asked: that is once a step."""
        self._usual = 0.0
        """Time of the newest step without a probe."""
        self._last: int | None = None
        """The step of the last look."""
        self._spent = 0.0
        self._cost = 0.0
        """Seconds that the last probe took."""
        self._settled = True
        """False: the last look has cost what it says, and perhaps more."""

    def due(self, step: int) -> bool:
        """True if this step is to be probed."""
        if self.every is None:
            return False
        now = self._clock()
        self._begin = self._begin or (step, now)
        took, self._asked = now - self._asked, now
        if self._settled:
            self._usual = took
        else:
            # Charge the look with what its step took beyond the usual, which it sees only a part
            # of. At most as much again: a validation after the step is not the look's.
            self._settled = True
            unseen = min(max(0.0, took - self._usual - self._cost), self._cost)
            self._spent += unseen
            self._cost += unseen
        offset, began = self._begin
        if self._last is None:
            return step >= offset + FIRST
        gone = step - self._last
        if self.every != "auto":
            return gone >= self.every
        if self.hurry:
            gap = 4  # steps between two probes while a trend shows
        else:
            # ever more rarely; between these what the long run's share allows
            age = gap = self._last - offset
            for until, early_gap in EARLY_GAPS:
                if age < until:
                    gap = min(early_gap, age)
                    break
        # a probe is at least this share of all steps so far after the last one: ever more rarely
        if gone < gap and (self.hurry or gone < max(1.0, 0.05 * step)):
            return False
        elapsed = now - began
        if gone < gap:
            allowed = SHARE / 2.0 * elapsed
        else:
            early = EARLY_SHARE * min(max(elapsed, LEAST_SECONDS), EARLY_SECONDS)
            allowed = early + SHARE * max(0.0, elapsed - EARLY_SECONDS)
        return self._spent + self._cost <= allowed

    def took(self, step: int, seconds: float) -> None:
        """A probe has been taken."""
        # the first one is always allowed: what it shows of the setup comes too late otherwise
        if self._last is not None:
            self._spent += seconds
        self._last = step
        self._cost = seconds
        self._settled = False


# --- What is known of a run without a look: is it given one batch again and again, and which
# parameters of its optimizer are never trained?


STILL_FROZEN, STILL_UNREACHED = 60, 90
"""Steps over which a parameter had `requires_grad=False`, or no gradient."""


class HostFacts:
    """Facts that cost no device read, taken at pairs of steps, ever more rarely.

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
        self._digest: tuple[int, str] = (-1, "")
        """Step and digest of its CPU inputs."""
        self._last_digest: Any = ""
        self._equal = 0
        """Sampled steps in a row with this digest."""
        self._exact: list[tuple[int, SeenBatch]] = []
        """A pair of steps that is compared with care; once in a run."""
        self._parameters: list[Tensor] = []
        self._first = 0
        """The sampled step that this list of parameters was first seen at."""
        self._newest = 0
        self._frozen: list[Tensor] = []
        self._unreached: list[Tensor] = []
        self.targets = TargetCounts(context)

    def sampling(self) -> bool:
        """Is the step at hand one of those that are sampled?"""
        step = self._context.step
        if step >= self._pair + self._gap or step < self._pair:
            self._pair = step
            self._gap += 2
        return step - self._pair < 2

    def saw_batch(self, batch: Any) -> None:
        """The data of the step, or a part of it."""
        if torch.is_grad_enabled() and transforms() is None:
            self.targets.add(batch)
        step = self._context.step
        if len(self._exact) > 2 or not torch.is_grad_enabled() or transforms() is not None:
            return
        # Sampled steps after which equal digests are compared with care
        if self._exact or (self._equal >= 7 and step == self._pair):
            if not self._exact or self._exact[-1][0] != step:
                self._exact.append((step, SeenBatch()))
            self._exact[-1][1].add(batch)
            return
        readable = []
        for leaf in tree_flatten(batch)[0]:
            if type(leaf) is Tensor and leaf.device.type == "cpu":
                readable.append(leaf)
        before = self._digest[1] if self._digest[0] == step else ""
        self._digest = (step, digest_of(readable, before))

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
        elif self._digest[0] == step and not self._exact:
            digest: Any = self._digest[1] or self._rows_of_loader(step)
            self._equal = self._equal + 1 if digest and digest == self._last_digest else 0
            self._last_digest = digest

    def _rows_of_loader(self, step: int) -> list[Any]:
        """Tensors on a device are not read: the sampler of a DataLoader says what they are."""
        recent = self._context.data.recent
        rows = []
        for one in recent.of_step(step) if recent is not None else []:
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
        modules = dict(named_modules(self._context.roots))
        still = set(map(id, self._frozen))
        unreached = set(map(id, self._unreached))
        places = []
        training: set[Any] = set()
        for parameter, name in parameter_names(self._context.roots, self._context.optimizer):
            prefix, _, leaf = name.rpartition(".")
            kind = (type(modules.get(prefix)), leaf)
            if id(parameter) in still:
                places.append((name, prefix, kind))
            elif id(parameter) not in unreached:
                training |= {prefix, kind}
        places = [place for place in places if place[1] in training]
        kinds = Counter(kind for _, _, kind in places)
        found = []
        for name, _, kind in places:
            one_of_torch = kinds[kind] == 1 and kind[0].__module__.startswith("torch.nn.")
            if kind in training or one_of_torch:
                found.append(name)
        return tuple(found)

    def unreached(self) -> tuple[str, ...]:
        """Trainable parameters that no sampled step has found with a gradient."""
        ids = {id(one) for one in self._unreached if one.requires_grad}
        if self._newest - self._first < STILL_UNREACHED or not ids:
            return ()
        pairs = parameter_names(self._context.roots, self._context.optimizer)
        names = [name for one, name in pairs if id(one) in ids]
        return without_unused_parts(self._context.roots, names)


# --- Report what a healthy run does wrong, and what it is heading for: everything once, as a line.


MOST = 64
"""Probes and readings that are remembered, and steps between two checks that need no look."""
SAME_BATCH = "SG907"
QUICK = 6
"""Steps over which the loss is compared at every step."""


class HealthCheck:
    """Keeps what the rules on healthy runs need, and reports each code once."""

    def __init__(self, context: Context, host_facts: HostFacts, schedule: LookSchedule) -> None:
        self._context = context
        self._host_facts = host_facts
        self._look_schedule = schedule
        self._looks: deque[Look] = deque(maxlen=MOST)
        self._committed: deque[Reading] = deque(maxlen=MOST)
        self._recent: deque[Reading] = deque(maxlen=MOST)
        """Committed steps, and those that a GradScaler skipped."""
        self._marked: deque[Reading] = deque(maxlen=2 * MOST)
        """Steps before probes and at changes of the loss scale, however long ago."""
        self._told: dict[str, float] = {}
        """Code -> last step up to which it is not reported again."""
        self._steps = 0
        self._schedule = _place(context.scheduler)
        """Where the schedule stood when the guard was made; None where it is not known."""
        self._highest: tuple[float, ...] = ()
        """Learning rates."""
        self._faded_since: int | None = None
        self._first: Reading | None = None
        self._look_is_new = False
        """It is judged with the reading of its step, which comes after it."""
        self.resume = ResumeCheck(context)
        self._weights: WeightFacts | None = None
        self._audit: AuditFacts | None = None
        self._named_metrics: dict[str, float] = {}
        """Values that the program follows and that were reported as NaN or Inf."""
        self.passes = Passes()
        self.evaluations = EvaluationObserver(context)
        self.micro_batches = LossFactors(context)
        self.overlap = Overlap(context)

    def audited(self, found: AuditFacts) -> None:
        """A step gave other values when it was run again."""
        self._audit = self._audit or found
        self._look_is_new = True

    def looked(self, look: Look) -> None:
        """A health probe was taken."""
        self._looks.append(look)
        self._look_is_new = True
        if self._recent:
            self._marked.append(self._recent[-1])
        self._forecast()

    def committed(self, reading: Reading) -> None:
        """A step went through."""
        before = self._committed[-1].lr if self._committed else ()
        self._committed.append(reading)
        self._steps += 1
        self._first = self._first or reading
        if reading.lr != before:
            # remember the highest rates, and since when the present ones are nothing beside them
            highest = self._highest
            if len(highest) != len(reading.lr):
                highest = reading.lr
            self._highest = tuple(map(max, highest, reading.lr))
            pairs = zip(reading.lr, self._highest, strict=True)
            # Learning rate, beside the highest of its group, at which nothing moves any more
            if not all(rate < 1e-4 * highest for rate, highest in pairs):
                self._faded_since = None
            elif self._faded_since is None:
                self._faded_since = reading.step
        if reading.followed:
            self._report_metrics(reading)
        if self._look_is_new or self._steps % MOST == 0:
            self._find_silent()

    def _report_metrics(self, reading: Reading) -> None:
        """Report, once each, followed values that alone are not finite."""
        bad = {}
        for name, value in reading.followed.items():
            if name not in self._named_metrics and not math.isfinite(value):
                bad[name] = value
        if bad:
            self._named_metrics.update(bad)
            self._context.outputs.note("metric", metric_only(bad, reading.step))

    def run_ended(self) -> None:
        """The run is over, and by itself: only now is late what happens once an epoch."""
        stood = self._schedule is not None and _place(self._context.scheduler) == self._schedule
        self._find_silent(ended=True, schedule_stood_for=self._steps if stood else 0)

    def _find_silent(self, **known: Any) -> None:
        self._look_is_new = False
        first = self._first or Reading(step=0)
        facts = self._host_facts
        if self._weights is None:
            self._weights = weight_facts(self._context)
        found = silent_findings(
            self._looks,
            self._committed,
            habits=self._context.memory.habits.counts,
            faded_since=self._faded_since,
            first_norm=first.grad_norm,
            first_loss=abs(first.loss) if first.loss is not None else None,
            shrinks_by=_shrinks_by(self._context.optimizer),
            same_batch=facts.same_batch,
            frozen=facts.frozen(),
            unreached=facts.unreached(),
            resume=self.resume.facts(self._first, self._looks),
            targets=facts.targets.facts(),
            weights=self._weights,
            audit=self._audit,
            loader=self.passes.facts(),
            evaluation=self.evaluations.facts,
            overlap=self.overlap.judge(),
            split=self.micro_batches.facts,
            optimizer=type(self._context.optimizer).__name__,
            **known,
        )
        for finding in found:
            if finding.code not in self._told:
                self._told[finding.code] = math.inf
                samples = self._looks[-1].facts.samples if self._looks else facts.samples
                if finding.code != SAME_BATCH or not _whole_data_set_in_a_batch(samples):
                    self._tell("silent", finding)

    def read(self, reading: Reading) -> None:
        """A step went through, or a GradScaler skipped it."""
        last = self._recent[-1] if self._recent else Reading(step=reading.step)
        if reading.step < last.step:
            # the run went back: what came after this step did not happen
            for kept in (self._looks, self._recent, self._marked):
                while kept and kept[-1].step >= reading.step:
                    kept.pop()
            last = self._recent[-1] if self._recent else Reading(step=reading.step)
        scale_changed = reading.scale is not None and reading.scale != last.scale
        if scale_changed:
            # the last step of a scale says whether it worked
            if last.scale is not None:
                self._marked.append(last)
            self._marked.append(reading)
        self._recent.append(reading)
        if scale_changed or self._loss_grows():
            self._forecast()

    def _loss_grows(self) -> bool:
        if len(self._recent) < QUICK:
            return False
        newest = self._recent[-1]
        before = self._recent[-QUICK].loss
        if newest.loss is None or before is None:
            return False
        # Steps between two comparisons with everything that is remembered: slow growth shows there
        if newest.step % 8 == 0:
            before = min(abs(one.loss) for one in self._recent if one.loss is not None)
        # Growth of the loss over these steps that is worth a closer check
        return abs(newest.loss) > 2.0 * abs(before)

    def _forecast(self) -> None:
        oldest = self._recent[0].step if self._recent else 0
        earlier = {one.step: one for one in self._marked if one.step < oldest}
        recent = [*(earlier[step] for step in sorted(earlier)), *self._recent]
        for finding, forecast in forecasts(self._looks, recent):
            if forecast.now > self._told.get(finding.code, -1):
                self._told[finding.code] = forecast.latest
                advice = f". What to do now: {finding.remedies[0].title}"
                self._tell("forecast", finding, advice, forecast=asdict(forecast))
        self._look_schedule.hurry = trend_begins(self._looks, recent)

    def _tell(self, kind: str, finding: Finding, advice: str = "", **more: Any) -> None:
        code = finding.code
        text = f"{code} {finding.title}: {'; '.join(finding.evidence)}{advice}"
        self._context.outputs.note(
            kind,
            f"{text} (stepguard explain {code})",
            code=code,
            certainty=finding.certainty,
            **more,
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
    for loader, length in data_loaders():
        with suppress(Exception):  # a data set without a length, or of the user's own
            if length == 1 and len(loader.dataset) == samples:
                return True
    return False


def _place(scheduler: Any) -> tuple[int, ...] | None:
    """How far a schedule has come that the loop should step; a plateau's may well never move."""
    with suppress(Exception):  # an object of the user's own
        if scheduler is not None and not wants_a_value(scheduler):
            return position(scheduler)
    return None


# --- What the step's driver reports on the way.


PART = "health probe"
AUDIT = "audit"
EVALUATION = "evaluations"
SILENT = "silent failures"
CLOSURE = "the optimizer calls a closure"
AVERAGES = ("ema", "average", "averaging", "swa", "shadow", "polyak")
"""Words by which people call an average of weights."""


class Looks(StepProbe):
    """Health probes, silent failures and forecasts of one guard.

    A fault in here costs the look, never the step.
    """

    def __init__(self, context: Context, protect: Protection) -> None:
        self._context = context
        self._protect = protect
        self.schedule = LookSchedule(context.config.probes.look_every)
        self._host_facts = HostFacts(context)
        self._check = HealthCheck(context, self._host_facts, self.schedule)
        self._running: DeepLook | None = None
        self._left_behind: DeepLook | None = None
        """A probe that an optimizer inside the backward pass has ended: no more are taken."""
        self._batches: Counter[str] = Counter()
        self._pair: tuple[SeenBatch, SeenBatch] | None = None
        """Batches of the last probed step and of the step after it, while that one runs."""
        self._batch_after: NextBatch = "unknown"
        self._outsiders: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensors that get gradients beside model and optimizer, and the number of each."""
        self._counted = itertools.count()
        self._closure = needs_closure(context.optimizer)
        audited = context.config.probes.audit_every is not None
        self._audit = Audit(context) if audited else None
        self._was_active = False
        """Was the newest step observed from its beginning?"""
        self._said: set[str] = set()
        """What was said already of probes that failed or could not be taken."""
        context.resources.callback(self.close)

    def observe_loaders(self, recent: RecentBatches) -> None:
        """Compare passes over the data, and what their workers draw."""
        with self._protect.part(SILENT):
            observe_workers(self._context.resources)
            recent.told.append(self._protected_pass)

    def _protected_pass(self, iterator: Any, raw: Any, batch: Any, step: int) -> None:
        try:
            self._check.micro_batches.delivered(iterator)
            self._check.overlap.delivered(iterator, raw, batch, step)
            if raw is not None:
                self._check.passes.delivered(iterator, raw, step)
        except Exception as fault:
            self._protect.failed(fault, SILENT)

    def begin(self) -> None:
        """The next step is about to begin."""
        context = self._context
        if self._check.evaluations.watching:
            self._check.evaluations.stop()
        if not self._check.resume.begun and torch.is_grad_enabled():
            with self._protect.part(SILENT):
                self._check.resume.begin()
        if self._audit is not None:
            self.audits = self._protect.armed and self._audit.due(context.step)
        if self._left_behind is not None:
            self._left_behind.observer.stop()
            return
        due = self._running is None and self.schedule.due(context.step)
        observing = self._running is not None or self._pair is not None
        self.active = any((due, observing, self._closure, self._host_facts.sampling()))
        if self.active:
            self._check.micro_batches.begin(counted=self._was_active)
        self._was_active = self.active
        # without gradients an evaluation or a rollout begins, which may be long, and no step
        if due and self._protect.armed and torch.is_grad_enabled():
            self._begin_look()

    def _begin_look(self) -> None:
        context = self._context
        why_not = {
            "rank 0 takes the health probes": context.agreement.world_rank != 0,
            "the model is sharded": context.sharded,
            # two modes would see each other's work
            "another dispatch mode is active (a tracer, a FLOP counter)": dispatch_mode_stack(),
            "torch.compile has compiled a part of this program": graphs_compiled(),
            CLOSURE: self._closure,
        }
        for reason, holds in why_not.items():
            if holds:
                self._say_why(reason)
                return
        with self._protect.part(PART):
            optimizers = [*guarded, context.optimizer]
            owned = set[int]().union(*map(optimizer_parameter_ids, optimizers))
            self._running = DeepLook(context.step, context.roots, context.optimizer, owned)
            self._running.begin()

    def evaluates(self, model: nn.Module) -> bool:
        """The model is called without gradients, in training mode: is a loss computed of it?"""
        with self._protect.part(EVALUATION):
            return tracing_state() is None and self._check.evaluations.called(model)
        return False

    def evaluated(self, output: Any) -> None:
        """Follow what the loop makes of the output."""
        with self._protect.part(EVALUATION):
            self._check.evaluations.returned(output)

    def _say_why(self, why_not: str, kind: str = "no_look") -> None:
        """Keep in the journal, once, why no look was taken, or no step audited."""
        if why_not not in self._said:
            self._said.add(why_not)
            fields = {"step": self._context.step, "reason": why_not}
            self._context.outputs.line(kind, fields)

    def saw_batch(self, batch: Any) -> None:
        """The data of the step."""
        if torch.is_grad_enabled():
            with self._protect.part(SILENT):
                self._check.micro_batches.called(batch)
        if self._host_facts.sampling() and self._protect.armed:
            with self._protect.part(SILENT), self.paused():
                self._host_facts.saw_batch(batch)
        look = self._running
        seen = [] if self._pair is None else [self._pair[1]]
        if look is not None:
            seen.append(look.batch)
        for one in seen:
            with self._protect.part(PART), self.paused():
                one.add(batch)
        if look is not None and not look.observer.on_the_stack:
            with self._protect.part(PART):
                # the model is called again before the update
                look.observer.start()

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass of the loop begins at this loss."""
        with self._protect.part(SILENT), self.paused():
            self._check.micro_batches.loss_seen(root)
        if self._running is not None:
            with self._protect.part(PART), self.paused():
                self._running.loss_seen(root)

    def backward_over(self) -> None:
        """A backward pass of the loop is over; others may follow before the update."""
        with self._protect.part(SILENT), self.paused():
            self._check.micro_batches.backward_over()
        self.gradients_ready()

    def norm_taken(self) -> None:
        """The loop clips."""
        self._check.micro_batches.norm_taken()

    def gradients_ready(self) -> None:
        """Forward and backward are over: what follows is the guard's own work."""
        if self._running is not None:
            with self._protect.part(PART):
                self._running.observer.stop()

    def audit(self, step: Step) -> None:
        """Run the step again, and put everything back."""
        self.audits = False
        with self._protect.part(AUDIT):
            assert self._audit is not None
            found = self._audit.run(step)
            if found is not None:
                self._check.audited(found)
            if self._audit.why_not:
                self._say_why(self._audit.why_not, "no_audit")

    def before_update(self) -> None:
        """The optimizer steps next."""
        if self._was_active:
            with self._protect.part(SILENT):
                self._check.micro_batches.before_update()
        if self._host_facts.sampling() and self._protect.armed:
            with self._protect.part(SILENT), self.paused():
                self._host_facts.before_update()
        if self._running is not None:
            with self._protect.part(PART):
                self._running.observer.stop()
                self._running.before_update()

    def finish(self, *, committed: bool) -> None:
        """The step is over. A bad one is reported elsewhere, and nothing is said of it here."""
        self.active = True  # until the next step begins: a loop may show no beginning
        if self._was_active:
            self._check.micro_batches.finish(committed=committed)
        if self._pair is not None:
            # the step after a look is over: was it given the same batch?
            self._batch_after = self._pair[0].compared(self._pair[1])
            self._pair = None
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
            faults = look.observer.faults
            fault = faults.get("probe", faults.get("notes"))
            if fault is not None and "fault" not in self._said:
                self._said.add("fault")
                missing = "nothing" if "probe" in faults else "a part of it"
                why = f"{type(fault).__name__}: {fault}"
                self._context.outputs.note(
                    "look",
                    f"the health probe at step {look.step} failed, and {missing} is reported: "
                    f"{why}. Training is not affected",
                    reason=f"a health probe failed: {why}",
                )
            # not where the step was a bad one after all: a fused update is judged later
            sizes = [one.weight + (one.update or 0.0) for one in taken.parameters]
            if committed and "probe" not in faults and all(map(math.isfinite, sizes)):
                self._tell(taken, look.outsiders)
            self._pair = (look.batch, SeenBatch())
            return
        # measuring failed, and would fail again at every look
        self.schedule.every = None

    def committed(self, reading: Reading) -> None:
        """The update of a step went through."""
        try:
            self._check.committed(reading)
        except Exception as fault:
            self._protect.failed(fault, SILENT)
        self.skipped(reading)

    def skipped(self, reading: Reading) -> None:
        """A GradScaler skipped the update."""
        try:
            self._check.read(reading)
        except Exception as fault:
            self._protect.failed(fault, "forecast")

    def run_ended(self) -> None:
        """No error has cut the run short."""
        with self._protect.part(SILENT):
            self._check.run_ended()

    def _tell(self, look: Look, outsiders: list[Tensor]) -> None:
        # Digests of those further objects that look like an average of the weights.
        shapes = {parameter.shape for parameter in self._context.parameters}
        averages = {}
        for name, thing in self._context.extra.items():
            if is_average(name, thing):
                tensors = [value for value in tensors_held(thing) if value.shape in shapes]
                if 2 * len(tensors) >= len(shapes):
                    averages[name] = digest_of(tensors)
        # What they are, by number and version: who updates one gives it another version.
        numbered = {}
        for one in outsiders:
            if one not in self._outsiders:
                self._outsiders[one] = next(self._counted)
            kind = "Parameter" if isinstance(one, nn.Parameter) else "tensor with requires_grad"
            named = f"{self._outsiders[one]}.{one._version}"
            numbered[named] = f"a {kind} of shape {list(one.shape)}"
        batch = look.facts.batch
        facts = replace(
            look.facts,
            averages=averages,
            batch_after=self._batch_after,
            outsiders=numbered,
            repeats=self._batches[batch],
        )
        if batch:
            self._batches[batch] += 1
        look = replace(look, facts=facts)
        self._context.outputs.look(look)
        self._check.looked(look)

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
        """End a probe that is under way, without a record."""
        self._check.evaluations.stop()
        for look in (self._running, self._left_behind):
            if look is not None:
                look.observer.stop()
        self._running = None


def is_average(name: str, thing: Any) -> bool:
    """Recognised by its type or name: a frozen teacher looks the same, and stays."""
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

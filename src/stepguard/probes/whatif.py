"""Train the steps before an incident again with one thing changed, and see what helps."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from stepguard._errors import CapsuleError, ConfigError, StateError
from stepguard.engine.context import Context, LeadUp, bare_step
from stepguard.engine.incident.situation import as_window, why_not
from stepguard.engine.recover.snapshots import SnapshotKeeper
from stepguard.locate.replay import kept_loss_function_state
from stepguard.locate.source import with_edits
from stepguard.records import Decision, Incident, Origin, Remedy
from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.report import probes as table
from stepguard.report.phrases import count
from stepguard.sentinel.gradients import clip, gradient_norm, scale_gradients
from stepguard.state.batch import LossFn, Step, batch_without, total_loss
from stepguard.state.capsule import Window, WindowStep, read_capsule, read_window
from stepguard.state.isolation import untouched
from stepguard.state.rng import kept_rng, restore_rng
from stepguard.state.run_state import RunState, SavedState
from stepguard.tensors.names import (
    named_buffers,
    named_modules,
    optimizer_parameter_ids,
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.torch_private import tree_map_only
from stepguard.tensors.values import HALVES, is_finite

# --- What might have helped: each candidate is one change of the run, and the words to make it.


OwnFix = Callable[..., Any]
"""Gets model and optimizer; may return a loss function or a context manager for the trial."""
RATES = {"lr x0.5": 0.5, "lr x0.1": 0.1}
SCALE_FACTOR = 1.0 / 16.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One change. Everything that is not named is as it was in the run."""

    name: str
    label: str
    cost: int
    """How much it changes a healthy run, 0 for nothing."""
    change: str
    """What to change so that the next run has it."""
    codes: tuple[str, ...] = ()
    """Findings whose remedy it is."""
    skip: bool = False
    rows: tuple[int, ...] = ()
    """Samples of the bad step to leave out, in its micro-batch `micro_batch`."""
    micro_batch: int = 0
    micro_batches: tuple[int, ...] = ()
    """Whole micro-batches of the bad step to leave out."""
    rates_at_most: tuple[float, ...] = ()
    """What the learning rate of each group must not pass."""
    fresh_state: bool = False
    """Forget the optimizer's state before the bad step."""
    lr_factor: float = 1.0
    scale_factor: float = 1.0
    clip_norm: float | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters of every parameter group that has them."""
    wide: str | None = None
    """Module to run in float32; "" is the whole model."""
    own: OwnFix | None = None
    fix: Remedy | None = None

    @property
    def late(self) -> bool:
        """Does it change nothing before the bad step?"""
        early = self.settings or self.wide is not None or self.own is not None or self.fix
        scaled = self.lr_factor != 1.0 or self.scale_factor != 1.0 or self.clip_norm is not None
        return not (early or scaled or self.rates_at_most)


UNCHANGED = Candidate(
    "nothing",
    "do nothing: the same steps again",
    0,
    "no change needed: the same steps do not fail when replayed",
    ("SG702",),
)
Offer = Callable[..., None]


def candidates(
    optimizer: Optimizer,
    incident: Incident,
    bad: WindowStep,
    *,
    way: Sequence[WindowStep],
    usual_norm: float | None,
    own: OwnFix | None = None,
) -> list[Candidate]:
    """What is worth a trial, the cheapest first, without `UNCHANGED`. `way`: to the bad step."""
    found: list[Candidate] = []

    def offer(
        cost: int, name: str, label: str, change: str, codes: str = "", **changes: Any
    ) -> None:
        found.append(Candidate(name, label, cost, change, tuple(codes.split()), **changes))

    skipping = 'nothing to change: Policy(actions=("skip", ...)) is the default'
    offer(2, "skip", "skip the step", skipping, skip=True)
    _offer_for_cause(offer, incident, bad)
    _offer_rates(offer, way, bad)
    _offer_settings(offer, optimizer)
    if bad.scale >= 2.0:
        smaller = bad.scale * SCALE_FACTOR
        label = f"smaller loss scale ({bad.scale:g} -> {smaller:g})"
        change = f"GradScaler(init_scale={smaller:g}), or GuardConfig(loss_scale={smaller:g})"
        offer(4, "loss scale", label, change, "SG506", scale_factor=SCALE_FACTOR)
    if usual_norm is not None:
        before = "not clipped"
        if bad.clip_norm is not None:
            before = f"{bad.clip_norm:g}"
            usual_norm = min(usual_norm, bad.clip_norm / 2.0)
        limit = float(f"{usual_norm:.2g}")
        label = f"clip the gradients to {limit:g} ({before} before)"
        change = f"GuardConfig(clip_norm={limit:g})"
        offer(7, "clip", label, change, "SG501 SG505", clip_norm=limit)
    if own is not None:
        name = getattr(own, "__name__", type(own).__name__)
        offer(3, "own", f"your own: {name}", f"what {name} does", own=own)
    return sorted(found, key=lambda candidate: candidate.cost)


def _offer_for_cause(offer: Offer, incident: Incident, bad: WindowStep) -> None:
    """What findings, samples and operands of the incident suggest."""
    # the change of the program that the panel offers
    remedies = [(one.code, fix) for one in incident.findings[:1] for fix in one.remedies]
    for code, fix in [(code, fix) for code, fix in remedies if fix.proven][:1]:
        change = f"{fix.title} (`stepguard fix` writes it)"
        offer(1, "fix", f"the fix for {code} in your code", change, code, fix=fix)
    _offer_without(offer, incident, bad)
    if incident.origin is not None:
        _offer_float32(offer, incident.origin)
    spoiled = any(name.startswith("opt:") for name in incident.reading.bad_state)
    if spoiled or any(finding.code == "SG503" for finding in incident.findings):
        label = "forget the optimizer's state before the step"
        change = "optimizer.state.clear() after loading, or a checkpoint from before the damage"
        offer(7, "fresh state", label, change, "SG503", fresh_state=True)


def _offer_without(offer: Offer, incident: Incident, bad: WindowStep) -> None:
    """Without the samples or micro-batches that are proven guilty."""
    origin = incident.origin
    guilty = incident.reading.bad_micro_batches
    without: dict[str, Any] = {}
    if origin is not None and origin.samples:
        micro = origin.micro_batch or 0
        if batch_without(bad.micro_batches[micro], origin.samples) is not None:
            what = origin.culprits
            without = {"rows": origin.samples, "micro_batch": micro}
    if not without and 0 < len(guilty) < len(bad.micro_batches):
        numbers = ", ".join(str(index + 1) for index in guilty)
        what = f"micro-batch {numbers} of {len(bad.micro_batches)}"
        without = {"micro_batches": guilty}
    if without:
        change = (
            'nothing to change: Policy(actions=("leave_out", ...)) is the default; repair the data'
        )
        codes = "SG101 SG102 SG103 SG104"
        offer(1, "leave out", f"leave out {what}", change, codes, **without)


def _offer_float32(offer: Offer, origin: Origin) -> None:
    """Where the bad value originated in half precision: its module, and the whole model."""
    halves = {str(dtype).removeprefix("torch.") for dtype in HALVES}
    operands = (*origin.inputs, origin.output)
    if not any(operand is not None and operand.dtype in halves for operand in operands):
        return
    codes = "SG301 SG302 SG801"
    change = "train without autocast and half-precision weights, or in bfloat16"
    offer(10, "float32", "the whole model in float32", change, codes, wide="")
    if origin.module:
        change = f"run {origin.module} under torch.autocast(device_type, enabled=False), in float32"
        offer(5, "wider module", f"{origin.module} in float32", change, codes, wide=origin.module)


def _offer_rates(offer: Offer, way: Sequence[WindowStep], bad: WindowStep) -> None:
    """Lower rates; and where a rate has jumped on the way to the bad step, the rate it had."""
    known = bool(bad.lr) and all(math.isfinite(rate) and rate > 0.0 for rate in bad.lr)
    for (name, factor), cost in zip(RATES.items(), (8, 11), strict=True):
        label = f"learning rate x{factor:g}"
        change = f"multiply the learning rate by {factor:g}"
        if known:
            rate = bad.lr[0]
            label += f" ({rate:.3g} -> {rate * factor:.3g})"
            change = f"lr={rate * factor:.3g} in place of {rate:.3g}"
        offer(cost, name, label, change, "SG505 SG504", lr_factor=factor)
    first = way[0].lr if way else ()
    for one in (*way[1:], bad):
        for now, then in zip(one.lr, first, strict=False):
            # not `>`, which is False where the rate is NaN now
            # a rate that has more than doubled
            if not now <= 2.0 * then:
                label = f"keep the learning rate of step {way[0].index} ({then:.3g})"
                change = f"the rate rises to {now:.3g} at step {one.index}: keep {then:.3g}"
                offer(3, "keep lr", label, change, "SG504 SG802", rates_at_most=first)
                return


def _offer_settings(offer: Offer, optimizer: Optimizer) -> None:
    """Larger epsilon, another memory of the second moment, no decay: where there are such."""
    kind = type(optimizer).__name__
    group = optimizer.param_groups[0]
    eps = group.get("eps")
    if isinstance(eps, float):
        halves = any(one.dtype is torch.float16 for one in optimizer_parameters(optimizer))
        # in float16 a smaller one rounds to 0 beside a second moment that is 0
        larger = max(100.0 * eps, 1e-4 if halves else 1e-6)
        label = f"larger epsilon ({eps:g} -> {larger:g})"
        change = f"{kind}(..., eps={larger:g})"
        offer(6, "eps", label, change, "SG502", settings=(("eps", larger),))
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and len(betas) == 2:
        memory = 0.999 if betas[1] < 0.9 else 0.95
        if betas[1] != memory:
            label = f"beta2 {betas[1]:g} -> {memory:g}"
            change = f"{kind}(..., betas=({betas[0]:g}, {memory:g}))"
            offer(9, "beta2", label, change, settings=(("betas", (betas[0], memory)),))
    decay = group.get("weight_decay", 0.0)
    # no training wants an update that takes away so much of the weights
    if isinstance(decay, float | int) and float(group.get("lr", 0.0)) * decay >= 0.1:
        label = f"weight decay {decay:g} -> 0"
        change = f"{kind}(..., weight_decay=0), or far less than {decay:g}"
        offer(7, "no decay", label, change, "SG505", settings=(("weight_decay", 0.0),))


# --- Order the outcomes: what works first, then what ends lower, then what changes training less.


NOISE_SHARE = 0.02
"""Losses that differ by less than this share are equal."""


def ranked(
    outcomes: Sequence[TrialOutcome], recorded: Sequence[float], healthy: float | None = None
) -> list[TrialOutcome]:
    """Return the best first.

    `recorded`: losses of the run on the way to the bad step. `healthy`: the loss of the good state
    that all trials began with; who ends no higher has lost nothing, however low others end.
    """
    noise = _noise_of_batches(recorded)
    floor = -math.inf
    if healthy is not None and math.isfinite(healthy):
        floor = healthy
    working = [outcome for outcome in outcomes if outcome.works]
    order: list[TrialOutcome] = []
    while working:
        known = [loss for loss in map(_loss, working) if loss > -math.inf]
        best = max(min(known, default=math.inf), floor)
        limit = best + max(NOISE_SHARE * abs(best), noise)
        # they lost nothing, or end where the best does, as far as so few batches can show
        equal = [outcome for outcome in working if _loss(outcome) <= limit]
        order += sorted(equal, key=lambda outcome: outcome.cost)
        working = [outcome for outcome in working if outcome not in equal]
    failing = [outcome for outcome in outcomes if not outcome.works]
    # of those that fail, the one that got furthest, then the cheapest
    failing.sort(key=lambda one: (bool(one.why_not), -len(one.losses), one.cost))
    return order + failing


def _noise_of_batches(recorded: Sequence[float]) -> float:
    """How much losses of neighbouring steps differ, without the trend of the run."""
    finite = [loss for loss in recorded if math.isfinite(loss)]
    steps = [abs(later - earlier) for earlier, later in pairwise(finite)]
    # Tie threshold, as a share of how much the losses of neighbouring steps differ
    return 0.25 * statistics.median(steps) if len(steps) > 1 else 0.0


def _loss(outcome: TrialOutcome) -> float:
    """Loss on held-out batches if there are any; minus infinity if none is known."""
    loss = outcome.loss if outcome.held_out is None else outcome.held_out
    return -math.inf if loss is None else loss


def _cheapest(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    """The cheapest one that works and ends no higher than skipping does."""
    working = sorted((one for one in outcomes if one.works), key=lambda one: one.cost)
    limit = math.inf
    for one in working:
        if one.name == "skip" and math.isfinite(_loss(one)):
            limit = _loss(one) + NOISE_SHARE * abs(_loss(one))
    return next((one for one in working if _loss(one) <= limit), None)


# --- What trials are run on: the bad step, the steps that led to it, and the objects to train.


SAME_LOSS = 1e-3
"""A loss that differs by less is the same."""


@dataclass(slots=True)
class TrialSubject:
    """The bad step, the way that led to it, and the objects to train."""

    step: Step
    bad: WindowStep
    window: Window
    run_state: RunState
    incident: Incident
    failed_before: list[WindowStep] = field(default_factory=list)
    """Bad steps shortly before or after, of a cause that may come again with any sample."""
    failed_next: int | None = None
    """The step after the bad one, where it failed as well."""

    @property
    def limit(self) -> float | None:
        """Loss above which a trial counts as bad: halfway from the losses before to the anomaly."""
        loss = self.incident.reading.loss
        if not self.incident.verdict.finite_anomaly or loss is None:
            return None
        before = [one.loss for one in self.window.steps if one.loss is not None]
        usual = statistics.median(before) if before else 0.0
        if usual >= loss:
            # the way to it was no better: then only what is clearly below it has helped
            usual = min(before)
        return min(usual + (loss - usual) / 2.0, loss - SAME_LOSS * abs(loss))

    @property
    def after(self) -> list[WindowStep]:
        """What is trained after the bad step: what really came, else the last steps before it."""
        later = [one for one in self.window.others if one.index > self.bad.index]
        room = 8 - len(self.failed_before)
        chosen = later[:room]
        if not later:
            chosen = (self.window.steps or self.window.others)[-room:]
        return [*chosen, *self.failed_before]

    @property
    def held_out(self) -> list[WindowStep]:
        """Batches that no trial is trained on."""
        trained = {one.index for one in self.after}
        free = [one for one in self.window.others if one.index not in trained]
        return free[-4:]


# --- Run trials on the user's own objects, and leave every one of them as it was.


def copied_state(run_state: RunState) -> SavedState:
    """Copy parameters, buffers and optimizer state as they are now. Raises StateError."""
    saved = run_state.gather_modules()
    tensors = dict(saved.tensors)
    facts = run_state.gather_optimizer(tensors)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return SavedState(copies, {**saved.facts, **facts})


def _put_back(run_state: RunState, saved: SavedState, *, own_only: bool) -> None:
    """Fill modules and optimizer; schedules, scalers and random numbers are nobody's here."""
    run_state.put_back_modules(saved, own_only=own_only)
    run_state.put_back_optimizer(saved)


@contextmanager
def undone(step: Step, run_state: RunState) -> Iterator[None]:
    """Whatever is trained in here, model, optimizer and random numbers end as they began."""
    present = copied_state(run_state)
    with ExitStack() as stack:
        stack.enter_context(untouched(step))
        stack.enter_context(kept_loss_function_state(step))
        # torch's hooks around the updates count steps, average weights, or are a guard's
        for name, hooks in vars(step.optimizer).items():
            if name.startswith("_optimizer_step") and isinstance(hooks, dict):
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        stack.callback(_put_back, run_state, present, own_only=False)
        yield


@contextmanager
def kept_program(roots: list[nn.Module], optimizer: Optimizer) -> Iterator[None]:
    """Undo what a fix of the user's own does: modules, hooks and forwards put in, settings."""
    groups = list(optimizer.param_groups)
    contents = [(group, dict(group)) for group in groups]
    for root in roots:
        for module in root.modules():
            # its attributes, and the content of its dicts: parameters, children, hooks
            for live in (vars(module), *vars(module).values()):
                if isinstance(live, dict):
                    contents.append((live, dict(live)))
    try:
        yield
    finally:
        optimizer.param_groups[:] = groups
        for live, content in contents:
            live.clear()
            live.update(content)


@contextmanager
def in_float32(module: nn.Module, *, whole: bool) -> Iterator[None]:
    """Run the module's forward in float32. `whole`: what it returns stays in float32."""
    original = module.forward
    own = vars(module).get("forward")
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    running = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running:
            return original(*args, **kwargs)
        args, kwargs = tree_map_only(
            Tensor, lambda one: one.float() if one.dtype in HALVES else one, (args, kwargs)
        )
        halves = {name: p for name, p in module.named_parameters() if p.dtype in HALVES}
        wide = {name: parameter.float() for name, parameter in halves.items()}
        running = True
        try:
            with torch.autocast(device, enabled=False):
                out = functional_call(module, wide, args, kwargs)
        finally:
            running = False
        if whole or not wide:
            return out
        # what comes next has weights in half precision and takes nothing else
        narrow = next(iter(halves.values())).dtype
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(narrow) if tensor.is_floating_point() else tensor, out
        )

    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


# --- Train the steps before an incident again with one thing changed.


MOST_STEPS = 32
"""Steps before the bad one that every candidate trains; what lies before is trained once."""
MOST_EVALUATED = 8


class _BadValueError(Exception):
    """What ends a trial: the step, and what was not finite in it."""


@dataclass(slots=True)
class _Course:
    """What one trial has seen so far."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    steps: float = 0.0
    scale_factor: float = 1.0
    """Falls where the loss scale overflows, as a scaler's does."""
    loss_fn: LossFn | None = None
    """In the place of the run's own, by a fix of the user's."""
    rate_factors: tuple[float, ...] = ()
    """What a fix of the user's multiplied the learning rates by."""


class _Trials:
    """Runs candidates, each from the same state. Use it inside `undone`."""

    def __init__(self, subject: TrialSubject) -> None:
        self._subject = subject
        self._optimizer = subject.step.optimizer
        self._roots = subject.step.named_roots()
        held = optimizer_parameter_ids(self._optimizer)
        named = parameter_names(self._roots, self._optimizer)
        self._named = [(parameter, name) for parameter, name in named if id(parameter) in held]
        self._parameters = [parameter for parameter, _ in self._named]
        self._start = subject.window.start
        self.steps = subject.window.steps
        """The steps before the bad one that each trial runs."""
        self._fill(self._start)
        if len(self.steps) > MOST_STEPS:
            # run the first of many steps once, and begin every trial after them
            for one in self.steps[:-MOST_STEPS]:
                with suppress(_BadValueError):
                    self._train(one, UNCHANGED, _Course())
            self._start = copied_state(subject.run_state)
            self.steps = self.steps[-MOST_STEPS:]
        self._start_rates = _rates(self._optimizer)
        self._finite = [name for name, buffer in named_buffers(self._roots) if is_finite(buffer)]
        # the losses of the good state, and the way to the bad step with nothing changed
        self.way = _Course()
        self._bad_way: _BadValueError | None = None
        self._fill(self._start)
        known = self._evaluated(self.steps[-MOST_EVALUATED:], self.way)
        held_out = self._evaluated(subject.held_out, self.way)
        self.healthy = known if held_out is None else held_out
        self._fill(self._start)
        try:
            for one in self.steps:
                self._train(one, UNCHANGED, self.way)
        except _BadValueError as bad:
            self._bad_way = bad
        self._before_bad = copied_state(subject.run_state)

    def run(self, candidate: Candidate) -> TrialOutcome:
        """Train with this one change; a fault of the trial itself is part of the outcome."""
        subject = self._subject
        found = subject.incident.findings
        base = TrialOutcome(
            name=candidate.name,
            label=candidate.label,
            cost=candidate.cost,
            change=candidate.change,
            value=candidate.clip_norm or dict(candidate.settings).get("eps"),
            answers=tuple(one.code for one in found if one.code in candidate.codes),
        )
        if candidate.skip:
            if subject.bad.index < 2:  # nothing is known of a run that went well
                why = "it cannot be tried: nothing was trained before the bad step"
                return replace(base, why_not=why)
            if not subject.after:
                why = "it cannot be tried: no other step of the run was kept"
                return replace(base, why_not=why)
            if subject.failed_next is not None:
                after = "the run dropped the step, and the next one failed as well"
                return replace(base, bad_step=subject.failed_next, bad_value=after)
        bad_step, bad_value = None, ""
        loss = held_out = None
        try:
            with self._changed(candidate) as course:
                try:
                    self._train_all(candidate, course)
                    loss = self._evaluated(self.steps[-MOST_EVALUATED:], course)
                    held_out = self._evaluated(subject.held_out, course)
                    self._check_state()
                except _BadValueError as bad:
                    bad_step, bad_value = bad.args
                distance = subject.run_state.distance(self._start)
        except Exception as fault:
            why = f"{type(fault).__name__}: {fault}".splitlines()[0]
            return replace(base, why_not=why)
        numbers = [number for number in (loss, held_out) if number is not None]
        return replace(
            base,
            works=bad_step is None and all(map(math.isfinite, numbers)),
            bad_step=bad_step,
            bad_value=bad_value,
            loss=loss,
            held_out=held_out,
            distance=distance,
            losses=tuple(course.losses),
            steps=math.ceil(course.steps),
        )

    def _train_all(self, candidate: Candidate, course: _Course) -> None:
        """The steps before the bad one, the bad one as the candidate has it, and those after."""
        bad = self._subject.bad
        if candidate.late:
            # nothing is changed before the bad step: come to it by what the run itself did
            self._fill(self._before_bad)
            course.losses = list(self.way.losses)
            if self._bad_way is not None:
                raise self._bad_way
        else:
            if candidate.own is None:
                self._fill(self._start)
            for key, value in candidate.settings:
                for group in self._optimizer.param_groups:
                    if key in group:
                        group[key] = value
            for one in self.steps:
                self._train(one, candidate, course)
        if candidate.fresh_state:
            self._optimizer.state.clear()
        if not candidate.skip:
            left = _without(bad, candidate)
            share = len(left.micro_batches) / len(bad.micro_batches)
            self._train(left, candidate, course, share)
        for one in self._subject.after:
            if one.index < bad.index:
                # a batch from before the bad step is trained at the rate of after it
                one = replace(one, lr=bad.lr)
            self._train(one, candidate, course)

    def _train(
        self, one: WindowStep, candidate: Candidate, course: _Course, share: float = 1.0
    ) -> None:
        """One step: forward, backward, clip, update. `share`: of its micro-batches."""
        course.steps += 1.0
        scale = one.scale * candidate.scale_factor * course.scale_factor
        loss = self._loss(one, course, scale)
        course.losses.append(loss)
        limit = self._subject.limit
        # earlier steps were what they were
        late = len(course.losses) > len(self.steps)
        if not math.isfinite(loss) or (limit is not None and late and loss > limit):
            raise _BadValueError(one.index, f"loss is {loss:.4g}")
        bad = self._bad_gradient()
        if bad and scale > 1.0:
            # by the loss scale alone? Then a scaler skips the update
            self._loss(one, course, 1.0)
            course.steps += 1.0
            bad = self._bad_gradient()
            if not bad:
                course.scale_factor /= 2.0
                return
        if bad:
            raise _BadValueError(one.index, f"gradient of {bad} is non-finite")
        if share != 1.0:
            scale_gradients(self._parameters, 1.0 / share)
        self._clip(one, candidate, course)
        self._set_rates(one.lr, candidate, course)
        self._optimizer.step()
        for parameter, name in self._named:
            if not is_finite(parameter):
                raise _BadValueError(one.index, f"the update makes {name} non-finite")

    def _loss(self, one: WindowStep, course: _Course, scale: float | None = None) -> float:
        """The loss of a step; with a scale, its gradients as well."""
        loss_fn = course.loss_fn or one.loss_fn or self._subject.step.loss_fn
        assert loss_fn is not None
        if scale is not None:
            for parameter in self._parameters:
                parameter.grad = None
        total = 0.0
        for number, batch in enumerate(one.micro_batches):
            restore_rng(one.rng[number])
            # with gradients on: a loss may differentiate by itself, as gradient penalties do
            loss = total_loss(loss_fn(batch))
            total += float(loss.detach())
            if scale is not None:
                torch.autograd.backward(loss * scale if scale != 1.0 else loss)
        if scale is not None and scale != 1.0:
            scale_gradients(self._parameters, 1.0 / scale)
        return total

    def _bad_gradient(self) -> str:
        for parameter, name in self._named:
            if parameter.grad is not None and not is_finite(parameter.grad):
                return name
        return ""

    def _clip(self, one: WindowStep, candidate: Candidate, course: _Course) -> None:
        """Clip as the run does, or harder."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = gradient_norm(gradients)
        if norm is None:
            return
        limit = one.clip_norm if candidate.clip_norm is None else candidate.clip_norm
        length = float(norm.total)
        course.norms.append(length)
        if math.isfinite(length):
            if limit is not None:
                clip(self._parameters, limit, norm, known=length)
        elif candidate.clip_norm is None:
            raise _BadValueError(one.index, "the norm of the gradients overflows")
        else:
            # the norm is beyond float32
            length = math.hypot(*(float(gradient.double().norm()) for gradient in gradients))
            scale_gradients(self._parameters, candidate.clip_norm / length)

    def _set_rates(self, rates: tuple[float, ...], candidate: Candidate, course: _Course) -> None:
        groups = self._optimizer.param_groups
        if len(rates) != len(groups):
            # not known: those of the state are as good as any
            rates = self._start_rates
        for number, group in enumerate(groups[: len(rates)]):
            rate = rates[number] * candidate.lr_factor
            if course.rate_factors:
                rate *= course.rate_factors[number]
            if candidate.rates_at_most and not rate <= candidate.rates_at_most[number]:
                # also where it is NaN
                rate = candidate.rates_at_most[number]
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate)
            elif "lr" in group:
                group["lr"] = rate

    def _evaluated(self, steps: Sequence[WindowStep], course: _Course) -> float | None:
        """Mean loss of these batches on the present weights."""
        course.steps += len(steps) / 3.0  # a forward pass of forward, backward and update
        losses = [self._loss(one, course) for one in steps]
        if losses:
            return statistics.fmean(losses)
        return None

    def _check_state(self) -> None:
        """Optimizer slots and buffers that turned bad without showing in a loss yet."""
        values: dict[str, Any] = {}
        for parameter, name in self._named:
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                values[f"{slot} of {name}"] = value
        for name, buffer in named_buffers(self._roots):
            if name in self._finite:
                values[f"buffer {name}"] = buffer
        for name, value in values.items():
            if isinstance(value, Tensor) and not is_finite(value):
                raise _BadValueError(self._subject.bad.index, f"{name} is non-finite")

    @contextmanager
    def _changed(self, candidate: Candidate) -> Iterator[_Course]:
        """What the candidate changes of the program itself, for the time of its trial."""
        course = _Course()
        with ExitStack() as stack:
            if candidate.wide is not None:
                module = dict(named_modules(self._roots))[candidate.wide]
                stack.enter_context(in_float32(module, whole=not candidate.wide))
            if candidate.fix is not None:
                stack.enter_context(with_edits(candidate.fix.edits, candidate.fix.needs))
            if candidate.own is not None:
                stack.enter_context(kept_program(list(self._roots.values()), self._optimizer))
                # settings that it makes are to win over those of the state
                self._fill(self._start)
                made = candidate.own(self._subject.step.model, self._optimizer)
                if hasattr(made, "__enter__"):
                    made = stack.enter_context(made)
                course.loss_fn = made if callable(made) else None
                pairs = zip(_rates(self._optimizer), self._start_rates, strict=False)
                course.rate_factors = tuple(now / then if then else 1.0 for now, then in pairs)
            yield course

    def _fill(self, saved: SavedState) -> None:
        _put_back(self._subject.run_state, saved, own_only=True)


def _without(bad: WindowStep, candidate: Candidate) -> WindowStep:
    """The bad step without the samples and micro-batches that the candidate leaves out."""
    batches = list(bad.micro_batches)
    if candidate.rows:
        number = candidate.micro_batch
        batches[number] = batch_without(batches[number], candidate.rows)
    left = [number for number in range(len(batches)) if number not in candidate.micro_batches]
    rng = [bad.rng[number] for number in left]
    return replace(bad, micro_batches=tuple(batches[number] for number in left), rng=rng)


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)


# --- Try every candidate for an incident on the steps that led to it, and rank them.


Progress = Callable[[int, int, str], None]
"""Receives how many trials are done, of how many, and the name of the next."""


def compare_candidates(
    subject: TrialSubject,
    *,
    own: OwnFix | None = None,
    only: Collection[str] = (),
    drop_step: bool = False,
    usual_norm: float | None = None,
    progress: Progress = lambda done, total, name: None,
) -> WhatIf:
    """Run the trials and rank them. Model, optimizer and random numbers end as they began.

    `only`: names of the candidates to try. `drop_step`: each without the bad step, unless it drops
    a part of it. `usual_norm`: of the gradients, where the steps before do not show it. Raises
    StateError where the state cannot be copied.
    """
    with undone(subject.step, subject.run_state):
        progress(0, 1, "the steps as they were")
        trials = _Trials(subject)
        offered = candidates(
            subject.step.optimizer,
            subject.incident,
            subject.bad,
            way=trials.steps,
            usual_norm=_median(trials.way.norms) or usual_norm,
            own=own,
        )
        waiting = [one for one in (UNCHANGED, *offered) if not only or one.name in only]
        outcomes: list[TrialOutcome] = []
        for number, candidate in enumerate(waiting):
            progress(number, len(waiting), candidate.label)
            if drop_step and not candidate.rows and not candidate.micro_batches:
                candidate = replace(candidate, skip=True)
            outcomes.append(trials.run(candidate))
        progress(len(waiting), len(waiting), "")
    steps = trials.steps
    recorded = [one.loss for one in steps if one.loss is not None]
    incident = subject.incident
    return WhatIf(
        incident=incident.id,
        step=incident.step,
        summary=incident.verdict.summary or incident.verdict.kind,
        first=steps[0].index if steps else subject.bad.index,
        window=len(steps),
        after=len(subject.after),
        held_out=len(subject.held_out),
        outcomes=tuple(ranked(outcomes, recorded, trials.healthy)),
        remarks=tuple(_remarks(subject, steps, trials.way.losses)),
    )


def _median(norms: Sequence[float]) -> float | None:
    known = [norm for norm in norms if math.isfinite(norm) and norm > 0.0]
    if known:
        return statistics.median(known)
    return None


def _remarks(
    subject: TrialSubject, steps: Sequence[WindowStep], again: Sequence[float]
) -> Iterator[str]:
    """What to know before believing the table."""
    if not steps:
        yield "no step before the bad one could be replayed: trials begin with it"
    for one, loss in zip(steps, again, strict=False):
        if one.loss is not None and not math.isclose(one.loss, loss, rel_tol=SAME_LOSS):
            yield (
                f"step {one.index} gives loss {loss:.4g} when replayed, in training it was "
                f"{one.loss:.4g}: the loss depends on more than the batch"
            )
            break
    if not subject.after:
        yield "nothing could be trained after the bad step: a later failure would go unnoticed"
    elif subject.after[0].index < subject.bad.index:
        yield "after the bad step, batches from before it are trained once more"
    if subject.failed_before:
        failed = ", ".join(str(one.index) for one in subject.failed_before)
        yield f"among them step {failed}, which failed as well"


# --- `guard.whatif()`: what would have helped against the last incident.


def try_what_helps(context: Context, snapshots: SnapshotKeeper, own: OwnFix | None) -> WhatIf:
    """Try the candidates for the last incident, and show what they came to. Raises ConfigError."""
    if not context.incidents:
        raise ConfigError("there is no incident yet: whatif examines the last one.")
    subject = _subject(context, snapshots)
    quiet = context.config.terminal != "auto"
    try:
        with kept_rng(), table.progress_bar(None if quiet else sys.stderr) as progress:
            found = compare_candidates(subject, own=own, progress=progress)
    except StateError as why:
        raise ConfigError(f"whatif cannot copy the state of this run: {why}") from None
    if not quiet:
        table.show(found, sys.stdout)
    return found


def _subject(context: Context, snapshots: SnapshotKeeper) -> TrialSubject:
    """The last bad step; of several in a row, the first."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != context.incidents[-1].id:
        why = why_not(context, bare_step(context))
        raise ConfigError(why or "nothing was kept of the last incident to try anything on.")
    failed = [*lead_up.failed_before, lead_up.bad]
    lead_up = lead_up.first or lead_up
    incident = next(one for one in context.incidents if one.id == lead_up.incident)
    # is neither a sample nor the batch to blame, so that any batch may fail?
    origin = incident.origin
    if incident.reading.bad_inputs or origin is None or origin.samples:
        failed = []
    following = lead_up.bad.index + 1
    failed_next = any(one.step == following for one in context.incidents)
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=_window(context, snapshots, lead_up, incident),
        run_state=snapshots.run_state,
        incident=incident,
        failed_before=[one for one in failed if one.index != lead_up.bad.index],
        failed_next=following if failed_next else None,
    )


def _window(
    context: Context, snapshots: SnapshotKeeper, lead_up: LeadUp, incident: Incident
) -> Window:
    """The steps in memory; else, once the run has gone on, those on disk."""
    later = [kept for kept in snapshots.kept.intact() if kept.step.index > lead_up.bad.index]
    others = [*lead_up.earlier, *as_window(later)]
    snapshot = lead_up.snapshot
    if snapshot is not None and not snapshot.overwritten:
        return Window(start=snapshot.state, steps=lead_up.steps, others=others)
    # are the present weights still those that the bad step began from?
    decision = incident.decision
    stood = decision is not None and decision.action in ("skip", "undo", "stop")
    if stood and decision is not None and decision.rewound_to is None:
        unmoved = context.history.committed == lead_up.committed
        if unmoved or context.step - lead_up.bad.index in (0, 1):
            return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    if incident.capsule is None or incident.run is None:
        raise ConfigError(
            "the state before the incident is gone: call guard.whatif() sooner, or give "
            "GuardConfig(run_dir=...), so that it is kept on disk."
        )
    capsule = Path(incident.run) / incident.capsule
    try:
        window = read_window(capsule)
        if window is None:
            # at least the state before the bad step
            window = Window(start=read_capsule(capsule).saved_state(), steps=[])
    except CapsuleError as why:
        raise ConfigError(f"the state before the incident is gone from memory, and {why}") from None
    return replace(window, others=[*window.others, *others])


# --- `Policy(on_incident="whatif")`: try what helps before deciding, do the cheapest that works.


APPLICABLE = ("leave out", "skip", "eps", "clip", *RATES)
"""What a guard can do by itself, and take back by a rewind."""


def what_helps(
    context: Context, snapshots: SnapshotKeeper, incident: Incident, decision: Decision
) -> Decision:
    """The decision after trials: the same, or one that was seen to work. The journal says why."""
    lead_up = context.memory.lead_up
    # Incidents of a run that are tried: one that fails all the time must not spend its time on it
    if lead_up is None or lead_up.incident != incident.id or len(context.incidents) >= 20:
        return decision
    window = _window_of_decision(snapshots, decision, lead_up)
    if window is None:
        return decision
    rewinds = decision.action == "rewind"
    subject = TrialSubject(lead_up.step, lead_up.bad, window, snapshots.run_state, incident)
    found = compare_candidates(
        subject,
        only=(UNCHANGED.name, *RATES) if rewinds else APPLICABLE,
        drop_step=not rewinds,
        usual_norm=_median(context.history.norms),
    )
    best = _cheapest(found.outcomes)
    why = "nothing that was tried helps"
    if best is not None:
        failed = [one.name for one in found.outcomes if not one.works and one.cost < best.cost]
        why = f"{best.label} keeps the bad value away for {count(found.after, 'step')}"
        if failed:
            why += f"; these do not: {', '.join(failed)}"
    fields = ("name", "works", "bad_value", "loss", "held_out")
    trials = [{name: getattr(one, name) for name in fields} for one in found.outcomes]
    context.outputs.note("whatif", why, step=found.step, trials=trials, steps=found.steps)
    return decision if best is None else _decided(decision, best, f"whatif: {why}")


def _window_of_decision(
    snapshots: SnapshotKeeper, decision: Decision, lead_up: LeadUp
) -> Window | None:
    """What to try another decision on; None where there is nothing."""
    if decision.action in ("skip", "undo", "leave_out"):
        # from the present weights: what keeps the bad value away in the steps that follow? A batch
        # that failed just before is what may come next
        others = [*lead_up.earlier, *lead_up.steps, *lead_up.failed_before]
        if others:
            return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    elif decision.action == "rewind" and decision.lr_factor is None:
        assert decision.rewound_to is not None
        # a rewind that would come to the same end: with which lower rate would it not?
        snapshot = snapshots.at(decision.rewound_to)
        kept = snapshots.kept.since(decision.rewound_to)
        if snapshot is not None and kept:
            return Window(start=snapshot.state, steps=as_window(kept), others=lead_up.earlier)
    return None


def _decided(decision: Decision, best: TrialOutcome, why: str) -> Decision:
    """What was seen to work, as far as it is another thing than what was decided."""
    if decision.action == "rewind":
        if best.name not in RATES:
            return decision
        # other weights come of a lower rate, so the steps since cannot be run again as they were
        return replace(decision, lr_factor=RATES[best.name], data="skip", reason=why)
    if best.name == "leave out":
        return replace(decision, reason=why) if decision.action == "leave_out" else decision
    changed = replace(decision, left_out="the step", reason=why)
    if decision.action != "undo":
        changed = replace(changed, action="skip")
    if best.name in RATES:
        return replace(changed, lr_factor=RATES[best.name])
    if best.name == "eps":
        return replace(changed, new_eps=best.value)
    return replace(changed, new_clip=best.value) if best.name == "clip" else changed

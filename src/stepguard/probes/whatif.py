"""Train the steps before an incident again with one thing changed, and see what happens."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
from stepguard.probes.whatif_candidates import (
    NOTHING,
    UNCHANGED,
    Candidate,
    OwnFix,
    candidates,
    judged_by,
    no_worse,
    ranked,
)
from stepguard.records import Action, Decision, Incident
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
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.torch_private import tree_map_only
from stepguard.tensors.values import HALVES, is_finite

# --- What trials are run on: the bad step, the steps that led to it, and the objects to train.


MOST_AFTER = 8
MOST_HELD_OUT = 4
LEAST_STEPS = 2
"""Steps before the bad one without which nothing is known of a run that went well."""
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
    """Bad steps shortly before or after, of a cause that no single sample brings: it may come
    again."""
    failed_next: int | None = None
    """The step after the bad one, where it failed as well."""

    @property
    def no_skip(self) -> str:
        """Why leaving the step out cannot be called a success, in words; empty where it can."""
        if self.bad.index < LEAST_STEPS:
            return "it cannot be tried: nothing was trained before the bad step"
        if not self.after:
            return "it cannot be tried: no other step of the run was kept"
        return ""

    @property
    def limit(self) -> float | None:
        """For a finite anomaly: a loss above it counts as bad from the bad step on.

        Half-way between the losses before the step and its own.
        """
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
        room = MOST_AFTER - len(self.failed_before)
        chosen = later[:room]
        if not later:
            chosen = (self.window.steps or self.window.others)[-room:]
        return [*chosen, *self.failed_before]

    @property
    def held_out(self) -> list[WindowStep]:
        """Batches that no trial is trained on."""
        trained = {one.index for one in self.after}
        free = [one for one in self.window.others if one.index not in trained]
        return free[-MOST_HELD_OUT:]


# --- Run trials on the user's own objects, and leave every one of them as it was.


HOOKS = "_optimizer_step"
"""How torch begins the names of an optimizer's lists of hooks."""


def copied_state(run_state: RunState) -> SavedState:
    """Copy parameters, buffers and optimizer state as they are now. Raises StateError."""
    saved = run_state.gather_modules()
    tensors = dict(saved.tensors)
    facts = run_state.gather_optimizer(tensors)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return SavedState(copies, {**saved.facts, **facts})


def put_back(run_state: RunState, saved: SavedState, *, own_only: bool) -> None:
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
        # hooks around the updates count steps, average weights, or are a guard's
        for name, hooks in vars(step.optimizer).items():
            if name.startswith(HOOKS) and isinstance(hooks, dict):
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        stack.callback(put_back, run_state, present, own_only=False)
        yield


@contextmanager
def kept_program(roots: list[nn.Module], optimizer: Optimizer) -> Iterator[None]:
    """Undo what a fix of the user's own does: modules, hooks and forwards put in, settings."""
    modules = [module for root in roots for module in root.modules()]
    attributes = []
    for module in modules:
        own = dict(vars(module))
        # the content of its dicts: parameters, children, hooks
        inside = {name: dict(value) for name, value in own.items() if isinstance(value, dict)}
        attributes.append((own, inside))
    groups = list(optimizer.param_groups)
    settings = [dict(group) for group in groups]
    try:
        yield
    finally:
        for module, (own, inside) in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(own)
            for name, content in inside.items():
                container = own[name]
                container.clear()
                container.update(content)
        optimizer.param_groups[:] = groups
        for group, kept in zip(groups, settings, strict=True):
            group.clear()
            group.update(kept)


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
        wide = {name: p.float() for name, p in module.named_parameters() if p.dtype in HALVES}
        running = True
        try:
            with torch.autocast(device, enabled=False):
                out = functional_call(module, wide, args, kwargs)
        finally:
            running = False
        if whole or not wide:
            return out
        # what comes next has weights in half precision and takes nothing else
        narrow = next(p.dtype for p in module.parameters() if p.dtype in HALVES)
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


# --- Train the steps before an incident again with one thing changed, and see what happens.


MOST_EVALUATED = 8
OF_A_STEP = 1.0 / 3.0
"""What an evaluation costs: a forward pass of forward, backward and update."""


@dataclass(slots=True)
class Course:
    """What one trial has seen so far."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    bad_step: int | None = None
    bad_value: str = ""
    steps: float = 0.0
    scale_factor: float = 1.0
    """Falls where the loss scale overflows, as a scaler's does."""
    loss_fn: LossFn | None = None
    """In the place of the run's own, by a fix of the user's."""
    rate_factors: tuple[float, ...] = ()
    """What a fix of the user's multiplied the learning rates by."""

    def failed(self, index: int, what: str) -> None:
        self.bad_step = index
        self.bad_value = what


class Trials:
    """Runs candidates, each from the same state. Use it inside `undone`."""

    def __init__(self, subject: TrialSubject, most_steps: int) -> None:
        self._subject = subject
        self._optimizer = subject.step.optimizer
        self._roots = subject.step.named_roots()
        held = {id(parameter) for parameter in optimizer_parameters(self._optimizer)}
        named = parameter_names(self._roots, self._optimizer)
        self._parameters = [(parameter, name) for parameter, name in named if id(parameter) in held]
        self._start = subject.window.start
        self.steps = subject.window.steps
        """The steps before the bad one that each trial runs."""
        self._before_bad: SavedState | None = None
        self._shared = Course()
        """The way to the bad step with nothing changed."""
        self._fill(self._start)
        if len(self.steps) > most_steps:
            # run the first of many steps once, and begin every trial after them
            early = self.steps[:-most_steps]
            for one in early:
                self._train(one, UNCHANGED, Course())
            self._start = copied_state(subject.run_state)
            self.steps = self.steps[len(early) :]
        self._start_rates = _rates(self._optimizer)
        self._healthy = [name for name, buffer in named_buffers(self._roots) if is_finite(buffer)]

    @property
    def usual_norm(self) -> float | None:
        """The median norm of the gradients on the way to the bad step."""
        norms = [norm for norm in self._shared.norms if math.isfinite(norm) and norm > 0.0]
        return statistics.median(norms) if norms else None

    def healthy(self) -> tuple[float | None, float | None]:
        """Losses of the good state: on batches of the window, and on those held out."""
        self._fill(self._start)
        loss = self._evaluated(self.steps[-MOST_EVALUATED:], self._shared)
        return loss, self._evaluated(self._subject.held_out, self._shared)

    def lead_up(self) -> list[float]:
        """Train the way to the bad step as it was, once; return its losses."""
        self._fill(self._start)
        for one in self.steps:
            self._train(one, UNCHANGED, self._shared)
            if self._shared.bad_step is not None:
                break
        self._before_bad = copied_state(self._subject.run_state)
        return list(self._shared.losses)

    def run(self, candidate: Candidate) -> TrialOutcome:
        """Train with this one change; a fault of the trial itself is told in the outcome."""
        codes = [finding.code for finding in self._subject.incident.findings]
        base = TrialOutcome(
            name=candidate.name,
            label=candidate.label,
            cost=candidate.cost,
            change=candidate.change,
            value=candidate.value,
            answers=tuple(code for code in codes if code in candidate.codes),
        )
        assert self._before_bad is not None, "the way to the bad step is run first"
        subject = self._subject
        if candidate.skip and subject.no_skip:
            return replace(base, why_not=subject.no_skip)
        if candidate.skip and subject.failed_next is not None:
            after = "the run left the step out, and the next one failed as well"
            return replace(base, bad_step=subject.failed_next, bad_value=after)
        try:
            with self._changed(candidate) as course:
                return self._measured(base, candidate, course)
        except Exception as fault:
            why = f"{type(fault).__name__}: {fault}".splitlines()[0]
            return replace(base, why_not=why)

    def _measured(self, base: TrialOutcome, candidate: Candidate, course: Course) -> TrialOutcome:
        self._to_bad_step(candidate, course)
        if course.bad_step is None:
            self._bad_step(candidate, course)
        for one in self._subject.after:
            if course.bad_step is not None:
                break
            self._train(one, candidate, course, rates_of=self._rates_after(one))
        loss = held_out = None
        if course.bad_step is None:
            loss = self._evaluated(self.steps[-MOST_EVALUATED:], course)
            held_out = self._evaluated(self._subject.held_out, course)
            self._last_look(course)
        numbers = [number for number in (loss, held_out) if number is not None]
        works = course.bad_step is None and all(map(math.isfinite, numbers))
        return replace(
            base,
            works=works,
            bad_step=course.bad_step,
            bad_value=course.bad_value,
            loss=loss,
            held_out=held_out,
            distance=self._subject.run_state.distance(self._start),
            losses=tuple(course.losses),
            steps=math.ceil(course.steps),
        )

    # --- the parts of a trial -------------------------------------------------------------------

    def _to_bad_step(self, candidate: Candidate, course: Course) -> None:
        """Come to the bad step, by what the run itself did where nothing is changed before it."""
        assert self._before_bad is not None
        if candidate.late:
            self._fill(self._before_bad)
            course.losses = list(self._shared.losses)
            if self._shared.bad_step is not None:
                course.failed(self._shared.bad_step, self._shared.bad_value)
            return
        if candidate.own is None:
            self._fill(self._start)
        for key, value in candidate.settings:
            for group in self._optimizer.param_groups:
                if key in group:
                    group[key] = value
        for one in self.steps:
            self._train(one, candidate, course)
            if course.bad_step is not None:
                return

    def _bad_step(self, candidate: Candidate, course: Course) -> None:
        if candidate.skip:
            return
        if candidate.fresh_state:
            self._optimizer.state.clear()
        bad = self._subject.bad
        if candidate.rows:
            batches = list(bad.micro_batches)
            batches[candidate.micro_batch] = batch_without(
                batches[candidate.micro_batch], candidate.rows
            )
            bad = replace(bad, micro_batches=tuple(batches))
        if candidate.micro_batches:
            left = [i for i in range(len(bad.micro_batches)) if i not in candidate.micro_batches]
            bad = replace(
                bad,
                micro_batches=tuple(bad.micro_batches[i] for i in left),
                rng=[bad.rng[i] for i in left],
            )
        share = len(bad.micro_batches) / len(self._subject.bad.micro_batches)
        self._train(bad, candidate, course, share, self._rates_after(bad))

    def _rates_after(self, one: WindowStep) -> tuple[float, ...]:
        """The rates from the bad step on; a batch of before it is trained at the rate of then."""
        if one.index < self._subject.bad.index:
            return self._subject.bad.lr
        return one.lr

    def _train(
        self,
        one: WindowStep,
        candidate: Candidate,
        course: Course,
        share: float = 1.0,
        rates_of: tuple[float, ...] | None = None,
    ) -> None:
        """One step: forward, backward, clip, update. What is not finite ends the trial."""
        course.steps += 1.0
        scale = one.scale * candidate.scale_factor * course.scale_factor
        loss = self._gradients(one, course, scale)
        course.losses.append(loss)
        limit = self._subject.limit
        # earlier steps were what they were
        late = len(course.losses) > len(self.steps)
        if not math.isfinite(loss) or (limit is not None and late and loss > limit):
            course.failed(one.index, f"loss is {loss:.4g}")
            return
        if not self._finite_gradients():
            self._overflowed(one, course, scale)
            return
        if share != 1.0:
            scale_gradients([p for p, _ in self._parameters], 1.0 / share)
        if not self._clip(one, candidate, course):
            return
        self._set_rates(one.lr if rates_of is None else rates_of, candidate, course)
        self._optimizer.step()
        for parameter, name in self._parameters:
            if not is_finite(parameter):
                course.failed(one.index, f"the update makes {name} non-finite")
                return

    def _gradients(self, one: WindowStep, course: Course, scale: float) -> float:
        loss_fn = course.loss_fn or one.loss_fn or self._subject.step.loss_fn
        assert loss_fn is not None
        for parameter, _ in self._parameters:
            parameter.grad = None
        total = 0.0
        for number, batch in enumerate(one.micro_batches):
            restore_rng(one.rng[number])
            loss = total_loss(loss_fn(batch))
            total += float(loss.detach())
            torch.autograd.backward(loss * scale if scale != 1.0 else loss)
        if scale != 1.0:
            scale_gradients([p for p, _ in self._parameters], 1.0 / scale)
        return total

    def _finite_gradients(self) -> bool:
        return all(p.grad is None or is_finite(p.grad) for p, _ in self._parameters)

    def _overflowed(self, one: WindowStep, course: Course, scale: float) -> None:
        """Non-finite gradients of a finite loss: by the loss scale alone, or by the step itself."""
        if scale > 1.0:
            self._gradients(one, course, 1.0)
            course.steps += 1.0
            if self._finite_gradients():
                course.scale_factor /= 2.0
                return
        for parameter, name in self._parameters:
            if parameter.grad is not None and not is_finite(parameter.grad):
                course.failed(one.index, f"gradient of {name} is non-finite")
                return

    def _clip(self, one: WindowStep, candidate: Candidate, course: Course) -> bool:
        """Clip as the run does, or harder; False where the norm itself overflows."""
        parameters = [parameter for parameter, _ in self._parameters]
        norm = gradient_norm([p.grad for p in parameters if p.grad is not None])
        if norm is None:
            return True
        length = float(norm.total)
        course.norms.append(length)
        if math.isfinite(length):
            limit = candidate.clip_norm if candidate.clip_norm is not None else one.clip_norm
            if limit is not None:
                clip(parameters, limit, norm, known=length)
            return True
        if candidate.clip_norm is None:
            course.failed(one.index, "the norm of the gradients overflows")
            return False
        # the norm is beyond float32
        gradients = [p.grad for p in parameters if p.grad is not None]
        length = math.hypot(*(float(one.double().norm()) for one in gradients))
        for gradient in gradients:
            gradient.mul_(candidate.clip_norm / length)
        return True

    def _set_rates(self, rates: tuple[float, ...], candidate: Candidate, course: Course) -> None:
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

    def _evaluated(self, steps: Sequence[WindowStep], course: Course) -> float | None:
        """Mean loss of these batches on the present weights."""
        losses: list[float] = []
        for one in steps:
            loss_fn = course.loss_fn or one.loss_fn or self._subject.step.loss_fn
            assert loss_fn is not None
            total = 0.0
            for number, batch in enumerate(one.micro_batches):
                restore_rng(one.rng[number])
                # with gradients on: a loss may differentiate by itself, as gradient penalties do
                total += float(total_loss(loss_fn(batch)).detach())
            losses.append(total)
            course.steps += OF_A_STEP
        return statistics.fmean(losses) if losses else None

    def _last_look(self, course: Course) -> None:
        """Optimizer slots and buffers that turned bad without showing in a loss yet."""
        index = self._subject.bad.index
        for parameter, name in self._parameters:
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and not is_finite(value):
                    course.failed(index, f"{slot} of {name} is non-finite")
                    return
        for name, buffer in named_buffers(self._roots):
            if name in self._healthy and not is_finite(buffer):
                course.failed(index, f"buffer {name} is non-finite")
                return

    # --- state ----------------------------------------------------------------------------------

    @contextmanager
    def _changed(self, candidate: Candidate) -> Iterator[Course]:
        """What the candidate changes of the program itself, for the time of its trial."""
        course = Course()
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
        put_back(self._subject.run_state, saved, own_only=True)


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)


# --- Try every candidate for an incident on the steps that led to it, and rank them.


MOST_STEPS = 32
"""Steps before the bad one that every candidate trains; what lies before is trained once."""
EQUAL_LOSS = 1e-3

Progress = Callable[[int, int, str], None]
"""Told how many trials are done, of how many, and the name of the next."""
Wanted = Callable[[Candidate], bool]
Adapt = Callable[[Candidate], Candidate]


def compare_candidates(
    subject: TrialSubject,
    *,
    own: OwnFix | None = None,
    wanted: Wanted = lambda candidate: True,
    adapt: Adapt = lambda candidate: candidate,
    usual_norm: float | None = None,
    most_steps: int = MOST_STEPS,
    progress: Progress = lambda done, total, name: None,
) -> WhatIf:
    """Run the trials and rank them. Model, optimizer and random numbers end as they began.

    `wanted`: which candidates to try; `adapt` changes each before its trial. `usual_norm`: of the
    gradients, where the steps before the bad one do not tell. Raises StateError where the state
    cannot be copied.
    """
    with undone(subject.step, subject.run_state):
        trials = Trials(subject, most_steps)
        progress(0, 1, "the steps as they were")
        healthy = judged_by(*trials.healthy())
        again = trials.lead_up()
        waiting = [NOTHING]
        waiting += candidates(
            subject.step.optimizer,
            subject.incident,
            subject.bad,
            way=trials.steps,
            usual_norm=trials.usual_norm or usual_norm,
            own=own,
        )
        waiting = [adapt(candidate) for candidate in waiting if wanted(candidate)]
        outcomes: list[TrialOutcome] = []
        for number, candidate in enumerate(waiting):
            progress(number, len(waiting), candidate.label)
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
        outcomes=tuple(ranked(outcomes, recorded, healthy)),
        remarks=tuple(_remarks(subject, steps, again)),
    )


def _remarks(
    subject: TrialSubject, steps: Sequence[WindowStep], again: Sequence[float]
) -> list[str]:
    """What to know before believing the table."""
    remarks: list[str] = []
    if not steps:
        remarks.append("no step before the bad one could be run again: trials begin with it")
    for one, loss in zip(steps, again, strict=False):
        if one.loss is not None and not math.isclose(one.loss, loss, rel_tol=EQUAL_LOSS):
            remarks.append(
                f"step {one.index} gives loss {loss:.4g} when run again, in training it was "
                f"{one.loss:.4g}: the loss depends on more than the batch"
            )
            break
    if not subject.after:
        remarks.append("nothing could be trained after the bad step: a later failure is not seen")
    elif subject.after[0].index < subject.bad.index:
        remarks.append("after the bad step, batches from before it are trained once more")
    if subject.failed_before:
        failed = ", ".join(str(one.index) for one in subject.failed_before)
        remarks.append(f"among them step {failed}, which failed as well")
    return remarks


# --- Try what would have helped: for `guard.whatif()`, and before a decision is applied.


# --- Try, on the way that led to the last incident, what would have helped.


NOTHING_MOVED = ("skip", "undo", "stop")
"""Decisions after which the weights are those that the bad step began from."""


def try_what_helps(context: Context, snapshots: SnapshotKeeper, own: OwnFix | None) -> WhatIf:
    """Try the candidates for the last incident, and show what they came to.

    Raises ConfigError with the reason where it cannot.
    """
    if not context.incidents:
        raise ConfigError("there is no incident yet: whatif looks at what went wrong.")
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
    failed = [one for one in failed if one.index != lead_up.bad.index]
    incident = next(one for one in context.incidents if one.id == lead_up.incident)
    window = _window(context, snapshots, lead_up, incident)
    following = lead_up.bad.index + 1
    failed_next = any(one.step == following for one in context.incidents)
    # Is neither a sample nor the batch to blame, so that any batch may fail?
    if incident.reading.bad_inputs or incident.origin is None:
        by_no_sample = False
    else:
        by_no_sample = not incident.origin.samples
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
        failed_before=failed if by_no_sample else [],
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
    # Are the present weights still those that the bad step began from?
    decision = incident.decision
    if decision is None or decision.action not in NOTHING_MOVED or decision.rewound_to is not None:
        nothing_moved_since = False
    else:
        unmoved = context.history.committed == lead_up.committed
        nothing_moved_since = unmoved or context.step - lead_up.bad.index in (0, 1)
    if nothing_moved_since:
        return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    if incident.capsule is not None and incident.run is not None:
        return window_on_disk(Path(incident.run) / incident.capsule, others)
    raise ConfigError(
        "the state before the incident is gone: call guard.whatif() sooner, or give "
        "GuardConfig(run_dir=...), so that it is kept on disk."
    )


def window_on_disk(capsule: Path, others: list[WindowStep]) -> Window:
    """What a capsule keeps of the way to its step; at least the state before it."""
    try:
        window = read_window(capsule)
        if window is None:
            content = read_capsule(capsule)
            window = Window(start=content.saved_state(), steps=[])
    except CapsuleError as why:
        raise ConfigError(f"the state before the incident is gone from memory, and {why}") from None
    return replace(window, others=[*window.others, *others])


# --- `Policy(on_incident="whatif")`: try what helps before deciding, and do the cheapest that
# works.


MOST_TRIED = 20
"""Incidents of a run that are tried: one that fails all the time must not spend its time on it."""
DROPS_THE_STEP = ("skip", "undo", "leave_out")
APPLICABLE = ("leave out", "skip", "eps", "clip", "lr x0.5", "lr x0.1")
"""What a guard can do by itself, and take back by a rewind."""
RATES = {"lr x0.5": 0.5, "lr x0.1": 0.1}


def what_helps(
    context: Context, snapshots: SnapshotKeeper, incident: Incident, decision: Decision
) -> Decision:
    """The decision after trials: the same, or one that was seen to work. The journal says why."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != incident.id or len(context.incidents) >= MOST_TRIED:
        return decision
    if decision.action in DROPS_THE_STEP:
        return _instead_of_skipping(context, snapshots, incident, decision, lead_up)
    if decision.action == "rewind":
        return _rewind_lower(context, snapshots, incident, decision, lead_up)
    return decision


def _instead_of_skipping(
    context: Context,
    snapshots: SnapshotKeeper,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """From the present weights: what keeps the bad value away in the steps that follow?"""
    # a batch that failed just before is what may come next
    others = [*lead_up.earlier, *lead_up.steps, *lead_up.failed_before]
    if not others:
        return decision
    window = Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    norms = context.history.norms
    found = compare_candidates(
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name in APPLICABLE,
        adapt=_without_the_step,
        usual_norm=statistics.median(norms) if norms else None,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None:
        return decision
    # What was seen to work, as far as it is another thing than what was decided.
    why = _why(found, best)
    if best.name == "leave out":
        if decision.action == "leave_out":
            return replace(decision, reason=why)
        return decision
    dropped: Action = "undo" if decision.action == "undo" else "skip"
    told = replace(decision, action=dropped, left_out="the step", reason=why)
    if best.name in RATES:
        return replace(told, lr_factor=RATES[best.name])
    if best.name == "eps":
        return replace(told, new_eps=best.value)
    if best.name == "clip":
        return replace(told, new_clip=best.value)
    return told


def _without_the_step(candidate: Candidate) -> Candidate:
    """What is changed for the steps that follow; the bad one is dropped in any case."""
    if candidate.rows or candidate.micro_batches:
        return candidate
    return replace(candidate, skip=True)


def _cheapest(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    """The cheapest one that works and ends no higher than skipping does."""
    working = sorted((one for one in outcomes if one.works), key=lambda one: one.cost)
    skipped = [one for one in working if one.name == "skip"]
    for one in working:
        if not skipped or no_worse(one, skipped[0]):
            return one
    return None


def _rewind_lower(
    context: Context,
    snapshots: SnapshotKeeper,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """A rewind that would come to the same end: with which lower rate would it not?"""
    assert decision.rewound_to is not None
    snapshot = snapshots.at(decision.rewound_to)
    kept = snapshots.kept.since(decision.rewound_to)
    if snapshot is None or not kept or decision.lr_factor is not None:
        return decision
    window = Window(start=snapshot.state, steps=as_window(kept), others=lead_up.earlier)
    found = compare_candidates(
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name == "nothing" or candidate.name in RATES,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None or best.name not in RATES:
        return decision
    # other weights come of a lower rate, so the steps since cannot be run again as they were
    return replace(decision, lr_factor=RATES[best.name], data="skip", reason=_why(found, best))


def _whatif_decision_subject(
    snapshots: SnapshotKeeper, incident: Incident, lead_up: LeadUp, window: Window
) -> TrialSubject:
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
    )


def _why(found: WhatIf, best: TrialOutcome) -> str:
    failed = [one.name for one in found.outcomes if not one.works and one.cost < best.cost]
    said = f"whatif: {best.label} keeps the bad value away for {count(found.after, 'step')}"
    if failed:
        said += f"; not so {', '.join(failed)}"
    return said


def _tell(context: Context, found: WhatIf, best: TrialOutcome | None) -> None:
    said = "nothing that was tried helps" if best is None else _why(found, best)
    trials = [
        {
            "name": one.name,
            "works": one.works,
            "bad_value": one.bad_value,
            "loss": one.loss,
            "held_out": one.held_out,
        }
        for one in found.outcomes
    ]
    context.outputs.note(
        "whatif", said.removeprefix("whatif: "), step=found.step, trials=trials, steps=found.steps
    )

"""Train the steps before an incident again with one thing changed, and see what happens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepguard.locate.patched_source import with_edits
from stepguard.records.whatif import TrialOutcome
from stepguard.sentinel.gradients import clip, gradient_norm, scale_gradients
from stepguard.state.batch_rows import batch_without
from stepguard.state.rng import restore_rng
from stepguard.state.run_state import SavedState
from stepguard.state.step import LossFn, Step, total_loss
from stepguard.state.steps_before import WindowStep
from stepguard.tensors.names import (
    named_buffers,
    named_modules,
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.values import is_finite
from stepguard.whatif.candidates import UNCHANGED, Candidate, answered
from stepguard.whatif.subject import TrialSubject
from stepguard.whatif.undone import copied_state, in_float32, kept_program, put_back

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
        self._steps = subject.window.steps
        self._before_bad: SavedState | None = None
        self._shared = Course()
        """The way to the bad step with nothing changed."""
        if len(self._steps) > most_steps:
            self._approach(len(self._steps) - most_steps)
        self._fill(self._start)
        self._start_rates = _rates(self._optimizer)
        self._healthy = [name for name, buffer in named_buffers(self._roots) if is_finite(buffer)]

    @property
    def steps(self) -> list[WindowStep]:
        """The steps before the bad one that each trial runs."""
        return self._steps

    @property
    def usual_norm(self) -> float | None:
        """The median norm of the gradients on the way to the bad step."""
        norms = [norm for norm in self._shared.norms if math.isfinite(norm) and norm > 0.0]
        return statistics.median(norms) if norms else None

    def _approach(self, count: int) -> None:
        """Run the first of many steps once, and begin every trial after them."""
        self._fill(self._start)
        course = Course()
        for one in self._steps[:count]:
            self._train(one, UNCHANGED, course)
        self._start = copied_state(self._subject.run_state)
        self._steps = self._steps[count:]

    def healthy(self) -> tuple[float | None, float | None]:
        """Losses of the good state: on batches of the window, and on those held out."""
        self._fill(self._start)
        loss = self._evaluated(self._steps[-MOST_EVALUATED:], self._shared)
        return loss, self._evaluated(self._subject.held_out, self._shared)

    def lead_up(self) -> list[float]:
        """Train the way to the bad step as it was, once; return its losses."""
        self._fill(self._start)
        for one in self._steps:
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
            answers=answered(candidate, codes),
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
            loss = self._evaluated(self._steps[-MOST_EVALUATED:], course)
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
        self._set(candidate)
        for one in self._steps:
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
        if self._bad_loss(one, loss, course):
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

    def _bad_loss(self, one: WindowStep, loss: float, course: Course) -> bool:
        if not math.isfinite(loss):
            course.failed(one.index, f"loss is {loss:g}")
            return True
        limit = self._subject.limit
        # earlier steps were what they were
        late = len(course.losses) > len(self._steps)
        if limit is not None and late and loss > limit:
            course.failed(one.index, f"loss is {loss:.4g}")
            return True
        return False

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
        _clip_in_float64(parameters, candidate.clip_norm)
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

    def _set(self, candidate: Candidate) -> None:
        for key, value in candidate.settings:
            for group in self._optimizer.param_groups:
                if key in group:
                    group[key] = value

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
                course.loss_fn = _started(candidate.own, self._subject.step, stack)
                pairs = zip(_rates(self._optimizer), self._start_rates, strict=False)
                course.rate_factors = tuple(now / then if then else 1.0 for now, then in pairs)
            yield course

    def _fill(self, saved: SavedState) -> None:
        put_back(self._subject.run_state, saved, own_only=True)


def _started(own: Callable[..., Any], step: Step, stack: ExitStack) -> LossFn | None:
    """Apply a fix of the user's own; the loss function it gives back, if any."""
    made = own(step.model, step.optimizer)
    if hasattr(made, "__enter__"):
        made = stack.enter_context(made)
    return made if callable(made) else None


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)


def _clip_in_float64(parameters: Sequence[Tensor], limit: float) -> None:
    """Clip gradients whose norm is beyond float32."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [float(torch.linalg.vector_norm(gradient.double())) for gradient in gradients]
    length = math.hypot(*norms)
    for gradient in gradients:
        gradient.mul_(limit / length)

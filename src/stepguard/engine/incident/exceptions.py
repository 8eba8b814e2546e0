"""Record exceptions of the user's code as incidents, with place and sample; they pass unchanged."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from stepguard._errors import StepguardError
from stepguard.engine.context import Context
from stepguard.engine.incident.incident_record import record
from stepguard.engine.protect import Protection
from stepguard.engine.transaction import Transaction
from stepguard.locate.origins import place_exception, traceback_origin
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.incident import Action
from stepguard.state.batch import Step
from stepguard.state.rng import capture_rng, kept_rng

MARK = "_stepguard_incident"
"""Attribute of an exception that is on record: keeping the exception would keep its tensors."""
MOST_WORDS = 300
MOST_PLACED = 3
"""Exceptions of one type and line that are run again; a loop may live with more of them."""
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
BROKEN_DEVICE = ("CUDA error", "device-side assert", "HIP error")


class Exceptions:
    """What one guard does about exceptions that pass through it."""

    def __init__(self, context: Context, protect: Protection, transaction: Transaction) -> None:
        self._context = context
        self._protect = protect
        self._transaction = transaction
        self._seen: Counter[tuple[str, str | None]] = Counter()

    def in_step(self, step: Step, error: Exception) -> Incident | None:
        """Record what the user's code raised inside `guard.step`; the incident if it is skipped.

        Buffers and counters are put back as they were before the step; its gradients are dropped.
        Random numbers go on from where the exception left them, as in a loop without a guard.
        """
        if isinstance(error, StepguardError) or not self._protect.armed:
            return None
        incident: Incident | None = None
        with kept_rng():
            with self._protect.part("state before an exception"):
                step.buffers.restore()
                for parameter in self._context.parameters:
                    parameter.grad = None
            with self._protect.part("record of an exception"):
                incident = self._record(step, error, may_skip=True)
        if incident is None or incident.decision is None or incident.decision.action != "skip":
            return None
        return incident

    def in_loop(self, step: Step, error: BaseException | None) -> None:
        """Record an exception that passes through a watched loop, and change nothing."""
        # a replay of another guard that was cut short
        ours = type(error).__module__.partition(".")[0] == "stepguard"
        if not self._protect.armed or ours or not isinstance(error, Exception):
            return
        if not recorded(error):
            with kept_rng(), self._protect.part("record of an exception"):
                self._record(step, error, may_skip=False)

    def _record(self, step: Step, error: Exception, *, may_skip: bool) -> Incident:
        context = self._context
        verdict = Verdict(
            kind="exception",
            severity="incident",
            summary=in_words(error),
            evidence={"type": type(error).__name__},
        )
        reading = Reading(step=step.index, lr=context.lr, schedule=context.schedule)
        incident = self._transaction.open_incident(step, reading, verdict)
        origin = traceback_origin(error, step.index, step.named_roots())
        with self._protect.part("place of an exception"):
            origin = self._placed(origin, step, error)
        decision = self._decide(error, may_skip=may_skip)
        if step.replayable:
            while len(step.rng) < len(step.micro_batches):
                step.rng.append(capture_rng())
        if not repeatable(error):
            # no memory to write a capsule with
            step = replace(step, loss_fn=None)
        incident = record(context, replace(incident, origin=origin, decision=decision), step)
        with contextlib.suppress(Exception):
            setattr(error, MARK, incident.id)
        return incident

    def _placed(self, origin: Origin, step: Step, error: Exception) -> Origin:
        """Run the step again to find the sample, where that is possible."""
        context = self._context
        key = (type(error).__name__, origin.source)
        self._seen[key] += 1
        if not context.config.locates or context.agreement.size > 1:
            return origin
        if self._seen[key] > MOST_PLACED or not step.rng or not repeatable(error):
            return origin
        # Of a watched model the forward can be run again, and the backward only once it is over.
        if not step.replayable and (not step.model_only or origin.phase == "backward"):
            return origin
        return place_exception(origin, error, step, len(step.rng) - 1, context.memory.effort)

    def _decide(self, error: Exception, *, may_skip: bool) -> Decision:
        context = self._context
        policy = context.config.policy
        action: Action = "stop"
        reason = "the exception is raised again"
        spent = context.budget
        if may_skip and policy.exceptions == "skip":
            spent = context.budget.spend().lose(1.0)
            context.budget = spent
            why_not = spent.exceeded(policy)
            if not repeatable(error):
                why_not = "memory or the device is exhausted"
            elif context.agreement.size > 1:
                why_not = "all ranks have to take the same steps"
            reason = f"no skip: {why_not}; the exception is raised again"
            if not why_not:
                action = "skip"
                reason = "Policy.exceptions is 'skip'"
        return Decision(
            action=action, reason=reason, consecutive=spent.consecutive, total=spent.total
        )


def recorded(error: BaseException) -> bool:
    """Is it, or what it came from, on record as an incident?"""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if getattr(error, MARK, None) is not None:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def in_words(error: BaseException) -> str:
    """`IndexError: Target 7 is out of bounds.`, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:MOST_WORDS].removesuffix(": ")


def repeatable(error: BaseException) -> bool:
    """Can the step be tried again at all? Not without memory, nor on a device that is lost."""
    if any(words in str(error) for words in BROKEN_DEVICE):
        return False
    return not out_of_memory(error)


def out_of_memory(error: BaseException) -> bool:
    """True for the errors of Python and torch, and for those of libraries that only say so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error).lower()
    return any(words in said for words in NO_MEMORY)


def tell_end(
    context: Context, error: BaseException | None, *, armed: bool, by_signal: str = ""
) -> None:
    """Write the last line of an attempt: how far it came, and by what it ended."""
    fields: dict[str, Any] = {
        "attempt": context.run.attempt,
        "steps": context.step,
        "incidents": len(context.incidents),
        "armed": armed,
    }
    told = ending(error)
    if told:
        fields["error"] = told
    if by_signal:
        fields["signal"] = by_signal
    context.outputs.line("end", fields)


def ending(error: BaseException | None) -> str:
    """What the end of a run says about the exception that ended it; empty where none did."""
    if error is None or isinstance(error, StepguardError | GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit):
        return ""
    return in_words(error)


def last_uncaught() -> BaseException | None:
    """The exception that is ending this process, if one is."""
    if "ipykernel" in sys.modules:
        # a notebook keeps one for every cell that failed
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

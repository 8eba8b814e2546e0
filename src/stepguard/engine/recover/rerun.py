"""Running steps a second time: one that failed by chance, or those since a snapshot."""

from __future__ import annotations

import random
from typing import Any, Protocol

from stepguard.engine.context import Context
from stepguard.engine.recover.kept_steps import Kept
from stepguard.engine.recover.snapshots import Recovery
from stepguard.engine.result import StepResult
from stepguard.records import Incident
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.snapshot import Snapshot
from stepguard.state.step import LossFn, Step


class Runs(Protocol):
    """Who runs steps."""

    context: Context
    recovery: Recovery

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult: ...


def run_again(
    runs: Runs, step: Step, incident: Incident | None, *, late: bool = False
) -> StepResult | None:
    """What the decision asks for after the state has been put back; the bad step's new result, if
    it got one.

    `late`: the loop has gone on since, so its random numbers are put back afterwards.
    """
    decision = incident.decision if incident is not None else None
    if incident is None or decision is None:
        return None
    end = capture_rng() if late else None
    result = None
    if decision.action == "retry":
        result = _retry(runs, step)
    elif decision.data == "repeat":
        result = _repeat(runs, step)
    elif decision.data == "reorder":
        _reorder(runs, incident)
    if end is not None:
        restore_rng(end)
    return result.answering(incident) if result is not None else None


def _retry(runs: Runs, step: Step) -> StepResult:
    runs.recovery.retried = step.index
    with runs.recovery.replaying():
        return _once_more(runs, step)


def _repeat(runs: Runs, step: Step) -> StepResult | None:
    """The steps since the snapshot exactly as they were, then the one that failed."""
    recovery = runs.recovery
    left, start = recovery.left, recovery.start
    assert start is not None
    with recovery.replaying():
        for kept in left:
            result = _once_more(runs, kept.step)
            if result.incident is not None:
                return None  # it fails again, and what is done about it has been decided anew
            if not kept.same(result.loss):
                _not_exact(runs, kept, result, start)
                return None
        return _once_more(runs, step)


def _not_exact(runs: Runs, kept: Kept, result: StepResult, start: Snapshot) -> None:
    """The loss function depends on more than its batch: what was run again is something else, so it
    is undone.
    """
    recovery = runs.recovery
    recovery.say(
        "rewind",
        f"step {kept.step.index} gave loss {kept.loss} and gives {result.loss} when run again: its "
        f"loss function "
        f"depends on more than the batch it is given, so the steps since {start.step} are left "
        f"behind instead",
    )
    recovery.put_back(start)


def _reorder(runs: Runs, incident: Incident) -> None:
    """The good steps since the snapshot, in another order, with new random numbers."""
    recovery = runs.recovery
    order = list(recovery.left)
    random.Random(f"{incident.id}/{runs.context.budget.rewinds}").shuffle(order)
    with recovery.replaying():
        for kept in order:
            assert kept.step.loss_fn is not None
            result = runs.run(kept.step.loss_fn, kept.step.micro_batches)
            decision = result.incident.decision if result.incident is not None else None
            if decision is not None and decision.action == "rewind":
                return


def _once_more(runs: Runs, step: Step) -> StepResult:
    assert step.loss_fn is not None and step.start is not None
    runs.context.step = step.index
    restore_rng(step.start)
    result = runs.run(step.loss_fn, step.micro_batches)
    result.read()
    return result

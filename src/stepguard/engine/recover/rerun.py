"""Run steps a second time: one that failed by chance, or those since a snapshot."""

from __future__ import annotations

import random
from typing import Any, Protocol

from stepguard.engine.context import Context
from stepguard.engine.recover.kept_steps import KeptStep
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.result import StepResult
from stepguard.records import Incident
from stepguard.report.phrases import number
from stepguard.sentinel.rank_agreement import RankFault
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.step import LossFn, Step


class Runs(Protocol):
    """A driver that runs steps itself."""

    context: Context
    rewinder: Rewinder

    def run(self, loss_fn: LossFn, micro_batches: tuple[Any, ...]) -> StepResult: ...


def run_again(
    runs: Runs, step: Step, incident: Incident | None, *, late: bool = False
) -> StepResult | None:
    """Run again what the decision asks for; the bad step's new result, None if it got none.

    `late`: the loop has drawn random numbers since, so they are put back afterwards.
    """
    decision = incident.decision if incident is not None else None
    if incident is None or decision is None:
        return None
    end = capture_rng() if late else None
    result = None
    if decision.action in ("retry", "heal"):
        # what a healed rank spoiled is run again on weights as they would have been
        result = _retry(runs, step)
    elif decision.data == "repeat":
        result = _repeat(runs, step)
    elif decision.data == "reorder":
        _reorder(runs, incident)
    if end is not None:
        restore_rng(end)
    if result is None:
        return None
    return result.answering(incident)


def _retry(runs: Runs, step: Step) -> StepResult:
    runs.rewinder.retried = step.index
    with runs.rewinder.snapshots.paused():
        return _once_more(runs, step)


def _repeat(runs: Runs, step: Step) -> StepResult | None:
    """Run the steps since the snapshot exactly as they were, then the one that failed."""
    rewinder = runs.rewinder
    start = rewinder.start
    assert start is not None
    with rewinder.snapshots.paused():
        for kept in rewinder.left:
            result = _once_more(runs, kept.step)
            missed = bool(runs.context.missed)
            if result.incident is not None and not missed:
                # it failed again, which was an incident of its own with its own decision
                return None
            # what this rank alone has refused, all of them hear of in the next step
            why = _why_not_on(runs, kept, result, same=missed or kept.same(result.loss))
            if why:
                left = f"so the steps since {start.step} are left behind instead"
                runs.context.outputs.note("rewind", f"{why}, {left}")
                runs.rewinder.put_back(start)
                return None
        return _once_more(runs, step)


def _why_not_on(runs: Runs, kept: KeptStep, result: StepResult, *, same: bool) -> str:
    """What keeps the ranks from running the next step again, too; empty if nothing does.

    A rank that went back once more alone would be waited for by the others.
    """
    agreement = runs.context.agreement
    try:
        told = agreement.together(lambda: {"same": same}, "a step that was run again")
    except RankFault as fault:
        return f"the ranks could not agree about steps that are run again ({fault})"
    if all(facts["same"] for facts in told):
        return ""
    return (
        f"step {kept.step.index} gave loss {number(kept.loss)}, and {number(result.loss)} when "
        f"run again: its loss function depends on more than the batch it is given"
    )


def _reorder(runs: Runs, incident: Incident) -> None:
    """Run the good steps since the snapshot in another order, with new random numbers."""
    rewinder = runs.rewinder
    order = list(rewinder.left)
    # seeded by what every rank knows, so that all of them run the same order
    random.Random(f"{incident.step}/{runs.context.budget.rewinds}").shuffle(order)
    with rewinder.snapshots.paused():
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

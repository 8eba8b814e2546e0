"""Run earlier steps on earlier weights: is it the weights, the batch or the loss function?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepguard.engine.context import Context
from stepguard.engine.recover.kept_steps import KeptStep
from stepguard.engine.recover.snapshots import Snapshots
from stepguard.state.replay import reevaluate
from stepguard.state.snapshot import Snapshot
from stepguard.state.step import Step


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses of an earlier step and of the present one; lower is better, each was evaluated."""

    step: int
    """The step of the snapshot, which is also the earlier step."""
    then: float
    """The earlier step when it ran."""
    again: float
    """The earlier step on the same weights, now."""
    now: float
    """The earlier step on the present weights."""
    this_then: float
    """The present step on the weights of the snapshot."""


def loss_function_changed(snapshots: Snapshots) -> bool:
    """Does no earlier step give its old loss on its old weights? False where none can be run.

    One snapshot that does is enough: another one may have been taken after the damage.
    """
    changed = False
    for snapshot, kept in _repeatable(snapshots, snapshots.ring.snapshots):
        with snapshots.run_state.parameters_from(snapshot.state):
            loss = reevaluate(kept.step)
        if kept.same(loss):
            return False
        changed = True
    return changed


def compare_with_best(context: Context, snapshots: Snapshots, step: Step) -> Comparison | None:
    """Run an earlier step and this one on the best weights this run had; None where impossible."""
    sign = -1.0 if context.maximizes else 1.0
    for snapshot, kept in _repeatable(snapshots, _best_first(snapshots)):
        if snapshot.step >= step.index:
            continue
        assert kept.loss is not None
        with snapshots.run_state.parameters_from(snapshot.state):
            again = sign * reevaluate(kept.step)
            this_then = sign * reevaluate(step)
        return Comparison(
            step=snapshot.step,
            then=sign * kept.loss,
            again=again,
            now=sign * reevaluate(kept.step),
            this_then=this_then,
        )
    return None


def _best_first(snapshots: Snapshots) -> list[Snapshot]:
    """Good snapshots whose level of the loss is known, the lowest first."""
    levelled: list[Snapshot] = []
    for snapshot in snapshots.ring.good():
        if snapshot.memory["level"] is not None and not snapshot.memory["diverged"]:
            levelled.append(snapshot)
    return sorted(levelled, key=lambda snapshot: float(snapshot.memory["level"]))


def _repeatable(
    snapshots: Snapshots, candidates: list[Snapshot]
) -> Iterator[tuple[Snapshot, KeptStep]]:
    """Sound snapshots with the step that began from each, where it can be run again."""
    for snapshot in candidates:
        kept = snapshots.kept.at(snapshot.step)
        if kept is None or kept.loss is None:
            continue
        if snapshots.probation.sound(snapshot):
            yield snapshot, kept

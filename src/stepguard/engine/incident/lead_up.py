"""Keep, by reference, the way that led to a bad step: what would have helped is tried on it."""

from __future__ import annotations

from torch import nn

from stepguard.engine.context import Context
from stepguard.engine.drivers.optimizer_kinds import takes_closure
from stepguard.engine.recover.kept_steps import KeptStep
from stepguard.engine.recover.snapshots import Snapshots
from stepguard.records import Incident
from stepguard.state.snapshot import Snapshot
from stepguard.state.step import Step
from stepguard.state.steps_before import WindowStep, window_step
from stepguard.tensors.torch_private import compiled_call
from stepguard.whatif.subject import LeadUp

SHORTLY = 4
"""Steps within which one bad step belongs to another."""


def keep_lead_up(context: Context, snapshots: Snapshots, incident: Incident, step: Step) -> None:
    """Keep what trials need of this step: references, and a snapshot that is not overwritten."""
    last = context.lead_up
    context.lead_up = None
    for one in (last, last.first if last is not None else None):
        if one is not None and one.snapshot is not None:
            one.snapshot.held = False
    if why_not(context, step):
        return
    lead_up = LeadUp(
        incident=incident.id,
        step=step,
        bad=window_step(step, incident.reading.loss, incident.reading.lr),
        timeline=context.budget.rewinds,
        committed=context.history.committed,
    )
    if last is not None and last.timeline == lead_up.timeline:
        recent = [*last.failed_before, last.bad]
        since = step.index - SHORTLY
        lead_up.failed_before = [one for one in recent if since <= one.index < step.index]
        if last.committed == lead_up.committed:
            # what led to the first of them is what a trial has to begin with
            lead_up.first = last.first or last
    _hold_window(snapshots, lead_up)
    if lead_up.first is not None and lead_up.first.snapshot is not None:
        lead_up.first.snapshot.held = True
    context.lead_up = lead_up


def _hold_window(snapshots: Snapshots, lead_up: LeadUp) -> None:
    """The snapshot that trials begin with, and the kept steps since and before it."""
    snapshot = _before(snapshots, lead_up.step.index)
    if snapshot is None:
        return
    snapshot.held = True
    lead_up.snapshot = snapshot
    lead_up.steps = as_window(snapshots.kept.since(snapshot.step) or [])
    earlier = [kept for kept in snapshots.kept.intact() if kept.step.index < snapshot.step]
    lead_up.earlier = as_window(earlier)


def _before(snapshots: Snapshots, index: int) -> Snapshot | None:
    """The newest good snapshot whose steps since are all kept, else the oldest sound one."""
    usable: list[Snapshot] = []
    for snapshot in snapshots.ring.snapshots:
        if snapshot.step > index or snapshots.kept.since(snapshot.step) is None:
            continue
        # steps from before parameters were added would be trained with them
        grown = snapshots.run_state.grown_since(snapshot.state)
        if not grown and snapshots.probation.sound(snapshot):
            usable.append(snapshot)
    good = [snapshot for snapshot in usable if snapshot.standing == "good"]
    if good:
        return good[-1]
    return usable[0] if usable else None


def as_window(kept: list[KeptStep]) -> list[WindowStep]:
    """What trials need of kept steps."""
    return [window_step(one.step, one.loss, one.lr) for one in kept]


def why_not(context: Context, step: Step) -> str:
    """Why the steps of this run cannot be tried again, in a sentence; empty where they can."""
    if context.agreement.size > 1 or context.sharded:
        return "whatif works in one process: with several ranks, use a capsule and --build."
    if context.outer is not None or takes_closure(context.optimizer):
        kind = type(context.outer or context.optimizer).__name__
        return f"whatif cannot run the update of {kind}, which evaluates or averages by itself."
    if any(map(_compiled, context.model.modules())):
        return "whatif cannot change a compiled model; build it without torch.compile."
    if not step.replayable:
        return (
            "whatif has no batches: run the steps by guard.step(loss_fn, batch), or hand the loss "
            "over by guard.loss(loss_fn, batch)."
        )
    return ""


def _compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()` below a guard that listens."""
    if "_orig_mod" in dict(module.named_children()):
        return True
    called = compiled_call(module)
    return getattr(called, "below", called) is not None

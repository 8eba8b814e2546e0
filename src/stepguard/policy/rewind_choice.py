"""Choose where a rewind goes: the newest good state for which this rewind has not been tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from stepguard.records.settings import Policy

RewindData = Literal["repeat", "skip", "reorder"]
"""What happens to the steps since the target: run again as they were, left behind, or run again in
another order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindTarget:
    """A state that is known to be good."""

    step: int
    kind: Literal["snapshot", "checkpoint"] = "snapshot"
    timeline: int = 0
    """Rewinds before it was taken: after a rewind a run passes the same step numbers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindPlan:
    """A target, what happens to the steps since, and what the learning rates are multiplied by."""

    target: RewindTarget
    data: RewindData
    lr_factor: float | None = None


def next_rewind(
    targets: Sequence[RewindTarget],
    tried: Collection[RewindPlan],
    policy: Policy,
    *,
    repeatable: bool,
    rewinds: int,
) -> RewindPlan | None:
    """Choose the next rewind; None when each has been tried. `targets` are newest first.

    `repeatable`: the fault may be gone when the steps since the newest target run again exactly as
    they were.
    """
    if not targets:
        return None
    # a fault of the hardware does not come again: then nothing at all is lost
    exact = RewindPlan(target=targets[0], data="repeat")
    if repeatable and exact not in tried:
        return exact
    lr_factor = None
    if policy.rewind_lr == "lower":
        lr_factor = policy.lr_factor ** (rewinds + 1)
    target = _first_unused(targets, tried)
    if target is not None:
        return RewindPlan(target=target, data=policy.rewind_data, lr_factor=lr_factor)
    # every target has been used: the newest one once more, with a still lower rate
    slower = RewindPlan(target=targets[0], data=policy.rewind_data, lr_factor=lr_factor)
    if lr_factor is None or slower in tried:
        return None
    return slower


def _first_unused(
    targets: Sequence[RewindTarget], tried: Collection[RewindPlan]
) -> RewindTarget | None:
    used = {plan.target for plan in tried if plan.data != "repeat"}
    for target in targets:
        if target not in used:
            return target
    return None

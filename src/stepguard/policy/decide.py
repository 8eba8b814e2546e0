"""The fault decides the remedy; the policy says which remedies are allowed and how much may be
lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepguard.policy.budget import Budget
from stepguard.policy.rewind_choice import Remedy
from stepguard.records.decision import Action, Decision
from stepguard.records.settings import Policy

Fault = Literal["data", "state", "update", "anomaly"]
"""`data`: born in the batch, the forward, the loss or the backward, on weights that are good.
`state`: a parameter, buffer or optimizer slot is damaged. `update`: the optimizer made it.
`anomaly`: everything is finite.
"""

NOTHING_GOOD = "no good snapshot or checkpoint to go back to"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the choice depends on besides policy and budget."""

    step: int
    fault: Fault = "data"
    at_start: bool = False
    """The state was bad before the guard's first step."""
    remedy: Remedy | None = None
    """Where a rewind would go, and what it would do there; None where there is nothing left to try.
    """
    no_rewind: str = NOTHING_GOOD
    """Why there is none."""
    may_act: bool = False
    """For an anomaly: the user asked for rewinds, and the weights were shown to be hurt."""
    can_retry: bool = False
    """The replay of the step is clean and the state is untouched: the same step may well succeed
    now.
    """
    leave_out: str = ""
    """What is proven guilty and can be left out of the step, in words; empty where nothing smaller
    than the step is.
    """
    lost_share: float = 1.0
    """Share of the step's samples that is lost if what is bad is left out."""
    known: bool = False
    """An earlier attempt of this run lost the same step: it is not counted a second time."""
    new_scale: float | None = None
    """A loss scale that is known to work, where the scale was the cause."""


def decide(situation: Situation, policy: Policy, budget: Budget) -> tuple[Decision, Budget]:
    """The action and the budget after it. Never raises."""
    spent = budget.spend(situation.step)
    if situation.at_start:
        return _bad_start(policy, spent)
    if situation.fault == "anomaly":
        return _anomaly(situation, policy, spent)
    if situation.fault == "state":
        return _damaged_state(situation, policy, spent)
    return _bad_step(situation, policy, spent)


def _anomaly(situation: Situation, policy: Policy, spent: Budget) -> tuple[Decision, Budget]:
    """A finite run is never halted: it is rewound where that is proven and possible, else told."""
    if situation.may_act and not _why_no_rewind(situation, policy, spent):
        return _choose("rewind", situation, policy, spent)
    return _choose("note", situation, policy, spent)


def _damaged_state(situation: Situation, policy: Policy, spent: Budget) -> tuple[Decision, Budget]:
    """Leaving the batch out changes nothing: the next one meets the same state."""
    why_not = _why_no_rewind(situation, policy, spent)
    if not why_not:
        return _choose("rewind", situation, policy, spent)
    return _choose(
        "stop", situation, policy, spent, f"the state itself is damaged; no rewind: {why_not}"
    )


def _bad_step(situation: Situation, policy: Policy, spent: Budget) -> tuple[Decision, Budget]:
    """The update has been vetoed or undone and the state is good: leave out what is bad and go on."""
    if situation.can_retry and "retry" in policy.actions:
        return _choose("retry", situation, policy, spent)
    after = spent if situation.known else spent.lose(situation.lost_share, policy)
    exceeded = after.exceeded(policy)
    if exceeded and not situation.known:
        return _choose("stop", situation, policy, after, exceeded)
    for action in policy.actions:
        if action == "stop":
            break
        if action == "leave_out" and situation.leave_out:
            return _choose(action, situation, policy, after)
        if action == "skip" and situation.fault == "update":
            return _choose("undo", situation, policy, after)
        if action in ("skip", "lower_lr", "note"):
            return _choose(action, situation, policy, after)
        if (
            action == "rewind"
            and not goes_on(policy)
            and not _why_no_rewind(situation, policy, after)
        ):
            return _choose(action, situation, policy, after)
    return _choose("stop", situation, policy, after, _nothing_allowed(policy))


def goes_on(policy: Policy) -> bool:
    """May a bad step be answered without going back? A policy that allows only rewinds gets them."""
    return any(action in policy.actions for action in ("leave_out", "skip", "lower_lr", "note"))


def _why_no_rewind(situation: Situation, policy: Policy, spent: Budget) -> str:
    if "rewind" not in policy.actions:
        return "Policy.actions has no 'rewind'"
    if situation.remedy is None:
        return situation.no_rewind or NOTHING_GOOD
    if spent.rewinds >= policy.max_rewinds:
        return (
            f"{spent.rewinds} rewinds used, {policy.max_rewinds} are allowed (Policy.max_rewinds)"
        )
    return ""


def _nothing_allowed(policy: Policy) -> str:
    return f"Policy.actions={policy.actions!r} allows nothing else for a bad step on good weights"


def _choose(
    action: Action, situation: Situation, policy: Policy, spent: Budget, reason: str = ""
) -> tuple[Decision, Budget]:
    lr_factor = policy.lr_factor if action == "lower_lr" else None
    remedy = situation.remedy if action == "rewind" else None
    if remedy is not None:
        lr_factor = remedy.lr_factor
    decision = Decision(
        action=action,
        reason=reason,
        consecutive=spent.consecutive,
        total=spent.total,
        lr_factor=lr_factor,
        rewound_to=remedy.place.step if remedy is not None else None,
        data=remedy.data if remedy is not None else None,
        left_out=_left_out(action, situation),
        new_scale=situation.new_scale,
    )
    if remedy is None:
        return decision, spent
    # what came before the rewind is undone, so only the rewind itself counts on
    after = Budget(
        recent=spent.recent,
        total=spent.total,
        rewinds=spent.rewinds + 1,
        seen=spent.seen,
        lost=spent.lost,
    )
    return decision, after


def _left_out(action: Action, situation: Situation) -> str:
    if action == "leave_out":
        return situation.leave_out
    return "the step" if action in ("skip", "lower_lr", "undo") else ""


def _bad_start(policy: Policy, spent: Budget) -> tuple[Decision, Budget]:
    why = "the state was bad before the first step"
    return Decision(
        action=policy.bad_start, reason=why, consecutive=spent.consecutive, total=spent.total
    ), spent

"""The first action of the policy that can still help."""

from __future__ import annotations

from dataclasses import dataclass

from stepguard.policy.budget import Budget
from stepguard.policy.places import Remedy
from stepguard.records.decision import Action, Decision
from stepguard.records.settings import Policy

BEYOND_REPAIR = 50.0
"""Times the progress of the whole run: a loss this far up does not come back by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the choice depends on besides policy and budget."""

    step: int
    hurt: bool = False
    """The weights or optimizer state in memory are bad: leaving this batch out changes nothing."""
    at_start: bool = False
    """They were bad before the guard's first step."""
    lost_share: float | None = None
    """For a finite step on hurt weights: how many times the progress made so far is lost."""
    remedy: Remedy | None = None
    """Where a rewind would go, and what it would do there; None where there is nothing left to try."""
    no_rewind: str = "no good snapshot or checkpoint to go back to"
    """Why there is none."""
    can_retry: bool = False
    """The replay of the step is clean and the state is untouched: the same step may well succeed now."""
    new_scale: float | None = None
    """A loss scale that is known to work, where the scale was the cause."""


def decide(situation: Situation, policy: Policy, budget: Budget) -> tuple[Decision, Budget]:
    """The action and the budget after it. Never raises; the last resort is `stop`."""
    spent = budget.spend(situation.step)
    if situation.at_start:
        return _bad_start(policy, spent)
    if _may_recover(situation, policy, spent):
        # leaving the batch out mends nothing, and training on from here often recovers by itself
        return _choose("note", situation, policy, spent, [f"no rewind: {situation.no_rewind}"])
    passed_over: list[str] = []
    for action in policy.actions:
        why_not = _why_not(action, situation, policy, spent)
        if not why_not:
            return _choose(action, situation, policy, spent, passed_over)
        if action != "retry":  # which most faults rule out by themselves
            passed_over.append(f"no {action}: {why_not}")
    return _choose("stop", situation, policy, spent, passed_over)


def _may_recover(situation: Situation, policy: Policy, spent: Budget) -> bool:
    if situation.lost_share is None or situation.lost_share >= BEYOND_REPAIR or situation.remedy is not None:
        return False
    return policy.actions[0] != "stop" and not spent.exceeded(policy)


def _why_not(action: Action, situation: Situation, policy: Policy, spent: Budget) -> str:
    if action == "stop":
        return ""
    if action == "rewind":
        if situation.remedy is None:
            return situation.no_rewind
        used = f"{spent.rewinds} rewinds used"
        return used if spent.rewinds >= policy.max_rewinds else ""
    if action == "retry" and not situation.can_retry:
        return "the fault is not transient"
    if situation.lost_share is not None:
        return "the weights are hurt, leaving this batch out mends nothing"
    if situation.hurt and action in ("retry", "skip", "lower_lr"):
        return "the state itself is damaged"
    return spent.exceeded(policy)


def _choose(
    action: Action, situation: Situation, policy: Policy, spent: Budget, passed_over: list[str]
) -> tuple[Decision, Budget]:
    remedy = situation.remedy if action == "rewind" else None
    decision = Decision(
        action=action,
        reason="; ".join(passed_over),
        consecutive=spent.consecutive,
        total=spent.total,
        lr_factor=policy.lr_factor if action == "lower_lr" else (remedy.lr_factor if remedy is not None else None),
        rewound_to=remedy.place.step if remedy is not None else None,
        data=remedy.data if remedy is not None else None,
        new_scale=situation.new_scale,
    )
    if action != "rewind":
        return decision, spent
    # what came before the rewind is undone, so only the rewind itself counts on
    return decision, Budget(recent=spent.recent, total=spent.total, rewinds=spent.rewinds + 1)


def _bad_start(policy: Policy, spent: Budget) -> tuple[Decision, Budget]:
    why = "the state was bad before the first step"
    return Decision(action=policy.bad_start, reason=why, consecutive=spent.consecutive, total=spent.total), spent

"""Decide what to do about an incident: the fault chooses among what the policy allows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from stepguard.records.incident import Action, Decision
from stepguard.records.settings import Policy

# --- Count how much a run has lost to bad steps, and say when it may lose no more.


LOST_WINDOW = 200
"""Steps over which `max_lost_share` is counted."""
MOST_HEALS = 1000
"""Times in a run that a damaged rank is given the state of a healthy one."""
LEAST_LOST = 32
"""Lost steps before their share counts: a bad stretch at the start of a run is soon half of it."""
COUNTERS = ("consecutive", "total", "rewinds", "heals", "seen")


@dataclass(slots=True, kw_only=True)
class Budget:
    """Counts of incidents, rewinds and lost samples; a committed step resets what is in a row.

    Never written to. Not frozen: one is made in every step, and a frozen one takes five times as
    long.
    """

    consecutive: int = 0
    total: int = 0
    rewinds: int = 0
    heals: int = 0
    seen: int = 0
    """Steps that were committed or lost so far."""
    lost: tuple[tuple[int, float], ...] = ()
    """For each bad step of the window: `seen` at that moment, and the share of its samples that was
    left out.
    """

    def spend(self) -> Budget:
        """Count one more incident."""
        return replace(self, consecutive=self.consecutive + 1, total=self.total + 1)

    def lose(self, share: float) -> Budget:
        """Count a step of which this share of the samples was left out, 1 for all of it."""
        seen = self.seen + 1
        since = seen - LOST_WINDOW
        kept = [entry for entry in self.lost if entry[0] > since]
        return replace(self, seen=seen, lost=(*kept, (seen, share)))

    def committed(self) -> Budget:
        """Count a step that went through."""
        # `replace` takes three times as long, and this is done in every step
        return Budget(
            total=self.total,
            rewinds=self.rewinds,
            heals=self.heals,
            seen=self.seen + 1,
            lost=self.lost,
        )

    def lost_share(self) -> float:
        """Share of the last LOST_WINDOW steps' samples that was left out; 0 while few were."""
        if len(self.lost) < LEAST_LOST or not self.seen:
            return 0.0
        return sum(share for _, share in self.lost) / min(LOST_WINDOW, self.seen)

    def exceeded(self, policy: Policy) -> str:
        """Say which limit the incidents so far break, in words; empty when none."""
        share = self.lost_share()
        if share > policy.max_lost_share:
            window = min(LOST_WINDOW, self.seen)
            allowed = f"{policy.max_lost_share:.0%} are allowed (Policy.max_lost_share)"
            return f"{share:.0%} of the samples of the last {window} steps were dropped, {allowed}"
        if _above(self.consecutive, policy.max_consecutive):
            return f"{_incidents(self.consecutive)} in a row, {policy.max_consecutive} are allowed"
        if _above(self.total, policy.max_total):
            return f"{_incidents(self.total)} in this run, {policy.max_total} are allowed"
        return ""


def _incidents(count: int) -> str:
    return "1 incident" if count == 1 else f"{count} incidents"


def _above(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def budget_from(facts: dict[str, Any]) -> Budget:
    """Read a budget from plain containers; fields that this version does not know are left out."""
    counts = {name: facts[name] for name in COUNTERS if name in facts}
    lost = [(int(seen), float(share)) for seen, share in facts.get("lost", ())]
    return Budget(**counts, lost=tuple(lost))


# --- Choose where a rewind goes: the newest good state for which this rewind has not been tried.


RewindData = Literal["repeat", "skip"]
"""What happens to the steps since the target: run again as they were, or dropped."""


class RewindTarget(NamedTuple):
    """A state that is known to be good."""

    step: int
    kind: Literal["snapshot", "checkpoint"] = "snapshot"
    timeline: int = 0
    """Rewinds before it was taken: after a rewind a run passes the same step numbers again."""


class RewindPlan(NamedTuple):
    """A target, and what happens to the steps since."""

    target: RewindTarget
    data: RewindData


def next_rewind(
    targets: Sequence[RewindTarget], tried: Collection[RewindPlan], *, repeatable: bool
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
    used = {plan.target for plan in tried if plan.data != "repeat"}
    for target in targets:
        if target not in used:
            return RewindPlan(target=target, data="skip")
    return None


# --- Decide what to do about an incident: the fault chooses among what the policy allows.


Fault = Literal["data", "state", "update", "anomaly"]
"""`data`: originated in the batch, forward, loss or backward, on weights that are good.
`state`: a parameter, buffer or optimizer slot is damaged. `update`: the optimizer made it.
`anomaly`: everything is finite.
"""

NOTHING_GOOD = "no good snapshot or checkpoint to go back to"


class Situation(NamedTuple):
    """What the decision depends on besides policy and budget."""

    step: int
    fault: Fault = "data"
    at_start: bool = False
    """The state was bad before the guard's first step."""
    rewind: RewindPlan | None = None
    """Where a rewind would go; None where there is nothing left to try."""
    no_rewind: str = NOTHING_GOOD
    """Why there is none."""
    no_heal: str = "no other rank holds a copy"
    """Why no healthy rank can give its state to a damaged one; empty where one can."""
    may_act: bool = False
    """For an anomaly: the user asked for rewinds, and the weights were shown to be hurt."""
    can_retry: bool = False
    """The replay of the step is clean and the state is untouched: it may succeed when run again."""
    leave_out: str = ""
    """What is proven guilty and can be left out, in words; empty where it is the whole step."""
    lost_share: float = 1.0
    """Share of the step's samples that is lost if what is bad is left out."""
    known: bool = False
    """An earlier attempt of this run lost the same step: it is not counted a second time."""
    new_scale: float | None = None
    """A loss scale that is known to work, where the scale was the cause."""


def decide(situation: Situation, policy: Policy, budget: Budget) -> tuple[Decision, Budget]:
    """Choose the action, and count it: the decision and the budget after it. Never raises."""
    spent = budget.spend()
    if situation.at_start:
        decision = Decision(
            action="note" if "note" in policy.actions else "stop",
            reason="the state was bad before the first step",
            consecutive=spent.consecutive,
            total=spent.total,
        )
        return decision, spent
    if situation.fault == "anomaly":
        # a finite run is never halted: it is rewound where that is proven and possible
        if situation.may_act and not _why_no_rewind(situation, policy, spent):
            return _choose("rewind", situation, policy, spent)
        return _choose("note", situation, policy, spent)
    if situation.fault == "state":
        # leaving the batch out changes nothing: the next one meets the same state
        allowed = "heal" in policy.actions and spent.heals < MOST_HEALS
        if allowed and not situation.no_heal:
            # a damaged rank gets the state of a healthy one, which loses nothing
            return _choose("heal", situation, policy, spent)
        why_not = _why_no_rewind(situation, policy, spent)
        if not why_not:
            return _choose("rewind", situation, policy, spent)
        reason = f"the state itself is damaged; no rewind: {why_not}"
        return _choose("stop", situation, policy, spent, reason)
    return _decide_bad_step(situation, policy, spent)


def _decide_bad_step(
    situation: Situation, policy: Policy, spent: Budget
) -> tuple[Decision, Budget]:
    """The update has been vetoed or undone and the state is good: leave out what is bad."""
    # a step that succeeds when it is run again loses nothing, so it spends no samples
    if situation.can_retry and "retry" in policy.actions:
        return _choose("retry", situation, policy, spent)
    after = spent
    if not situation.known:
        after = spent.lose(situation.lost_share)
        exceeded = after.exceeded(policy)
        if exceeded:
            return _choose("stop", situation, policy, after, exceeded)
    # in the user's order: the first one that fits is taken
    for allowed in policy.actions:
        match allowed:
            case "stop":
                break
            case "leave_out" if situation.leave_out:
                return _choose("leave_out", situation, policy, after)
            case "skip":
                action: Action = "undo" if situation.fault == "update" else "skip"
                return _choose(action, situation, policy, after)
            case "rewind" if not allows_continuing(policy):
                if not _why_no_rewind(situation, policy, after):
                    return _choose("rewind", situation, policy, after)
            case "note":
                return _choose("note", situation, policy, after)
    reason = f"Policy.actions={policy.actions!r} allows nothing else for a bad step on good weights"
    return _choose("stop", situation, policy, after, reason)


def allows_continuing(policy: Policy) -> bool:
    """Say whether a bad step may be answered without going back; else rewinds are its answer."""
    return not {"leave_out", "skip", "note"}.isdisjoint(policy.actions)


def _why_no_rewind(situation: Situation, policy: Policy, spent: Budget) -> str:
    if "rewind" not in policy.actions:
        return "Policy.actions has no 'rewind'"
    if situation.rewind is None:
        return situation.no_rewind or NOTHING_GOOD
    if spent.rewinds >= policy.max_rewinds:
        allowed = f"{policy.max_rewinds} are allowed (Policy.max_rewinds)"
        return f"rewinds used: {spent.rewinds}, {allowed}"
    return ""


def _choose(
    action: Action, situation: Situation, policy: Policy, spent: Budget, reason: str = ""
) -> tuple[Decision, Budget]:
    left_out = {"leave_out": situation.leave_out, "skip": "the step", "undo": "the step"}
    decision = Decision(
        action=action,
        reason=reason,
        consecutive=spent.consecutive,
        total=spent.total,
        left_out=left_out.get(action, ""),
        new_scale=situation.new_scale,
    )
    if action == "rewind":
        assert situation.rewind is not None, "a rewind is decided with a plan only"
        target = situation.rewind.target.step
        decision = replace(decision, rewound_to=target, data=situation.rewind.data)
        # what came before the rewind is undone, so the incidents in a row are forgiven
        return decision, replace(spent, consecutive=0, rewinds=spent.rewinds + 1)
    if action == "heal":
        return decision, replace(spent, heals=spent.heals + 1)
    return decision, spent

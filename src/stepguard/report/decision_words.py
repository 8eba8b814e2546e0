"""What was done about an incident, in words: one table for every output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepguard.records import Decision, Incident, Policy
from stepguard.records.decision import Action
from stepguard.report import phrases


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionWords:
    """One action in the words of each output."""

    done: str
    """After `step 48`: what was done."""
    effect: str
    """What that means for the state in memory."""
    log: str
    """The line of the readable log."""


ACTION_WORDS: dict[Action, ActionWords] = {
    "leave_out": ActionWords(
        done="went on without what was bad",
        effect="the update was made from the rest of the step",
        log="Going on without what was bad",
    ),
    "retry": ActionWords(
        done="run again",
        effect=(
            "the replay is clean, so the same step is run once more with the same random numbers"
        ),
        log="Running the same step once more",
    ),
    "skip": ActionWords(
        done="skipped",
        effect="weights, optimizer state and buffers are as before the step",
        log="Skipping batch and resetting gradients",
    ),
    "undo": ActionWords(
        done="update taken back",
        effect="weights, optimizer state and buffers are as before the step",
        log="Taking the update back",
    ),
    "heal": ActionWords(
        done="healed from a healthy rank",
        effect="all ranks hold the weights and optimizer state of one that was undamaged",
        log="Healing the damaged rank from a healthy one",
    ),
    "rewind": ActionWords(
        done="rewound",
        effect="model, optimizer, schedule and buffers are back at a state that was good",
        log="Rewinding to the last good snapshot",
    ),
    "lower_lr": ActionWords(
        done="skipped, learning rate lowered",
        effect="weights are as before the step",
        log="Skipping batch and resetting gradients, lowering the learning rate",
    ),
    "stop": ActionWords(
        done="stopped the run",
        effect="weights are those from before the bad step",
        log="Stopping training to prevent corruption...",
    ),
    "note": ActionWords(
        done="told, nothing done",
        effect="the update was made",
        log="Going on",
    ),
}
"""A test holds this table against the actions there are."""

REWIND_DATA = {
    "repeat": "; the steps since run again as they were",
    "skip": "; training goes on with the next batch",
    "reorder": "; the steps since run again in another order, without the bad one",
}


def done(decision: Decision) -> str:
    """What was done, and for a part that was left out, which."""
    if decision.action == "leave_out" and decision.left_out:
        return f"went on without {decision.left_out}"
    return ACTION_WORDS[decision.action].done


def done_times(actions: Mapping[Action, int]) -> str:
    """`skipped 3, rewound 1`."""
    return ", ".join(f"{ACTION_WORDS[action].done} {times}" for action, times in actions.items())


def effect(incident: Incident) -> str:
    """What the decision means for the state in memory."""
    decision = incident.decision
    if decision is None:
        return ""
    if decision.action == "stop" and decision.rewound_to is not None:
        steps = phrases.count(decision.rewound_to, "step")
        return f"the weights are those after {steps}, the newest without the damage"
    if incident.reading.bad_state and decision.action in ("stop", "note"):
        damaged = phrases.first_few(incident.reading.bad_state, 2)
        return f"the state in memory is damaged ({damaged}): restore a good checkpoint"
    if decision.rewound_to is not None:
        return _rewound(decision, decision.rewound_to)
    if decision.not_restored:
        return f"the update was vetoed, but {decision.not_restored}"
    return ACTION_WORDS[decision.action].effect


def _rewound(decision: Decision, to: int) -> str:
    """Where a rewind went, and what became of the steps since."""
    since = REWIND_DATA.get(decision.data or "", "")
    return f"everything is as it was after {phrases.count(to, 'step')}{since}"


def budget(decision: Decision, policy: Policy | None = None) -> str:
    """How many incidents so far; of how many, where the policy is known."""
    row = str(decision.consecutive)
    total = str(decision.total)
    if policy is not None and policy.max_consecutive is not None:
        row += f" of {policy.max_consecutive}"
    if policy is not None and policy.max_total is not None:
        total += f" of {policy.max_total}"
    return f"{row} in a row, {total} in this run"

"""How numbers, tensors and samples are put into words: the same words in every output."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from stepguard.records import Decision, Incident, Origin, Policy, Remedy
from stepguard.records import incident as records
from stepguard.records.incident import Action, place
from stepguard.report.screen import middle

VERDICT_TITLES = {
    "nonfinite_input": "non-finite input",
    "nonfinite_loss": "non-finite loss",
    "loss_overflow": "loss too large for its dtype",
    "nonfinite_gradient": "non-finite gradient",
    "nonfinite_parameter": "non-finite parameter",
    "nonfinite_buffer": "non-finite buffer",
    "nonfinite_optimizer_state": "non-finite optimizer state",
    "infinite_norm": "infinite gradient norm",
    "zero_loss": "zero loss",
    "no_labels": "no labels",
    "scale_calibration": "loss-scale calibration",
    "scaler_collapse": "loss-scale collapse",
    "spike": "loss spike",
    "drift": "slow rise of the loss",
    "lr_mismatch": "unexpected learning rate",
    "exception": "exception",
    "replica_drift": "ranks have drifted apart",
    "same_data": "ranks read the same data",
}

"""A test holds this table against the kinds there are."""

SAFETY_NOTES = {
    "safe": "",
    "changes-numbers": " (changes values)",
    "changes-training": " (changes what is learned)",
}
HAND_OVER = Remedy(
    title="Compute the loss through the guard: a bad step can then be replayed, and is "
    "located at once",
    snippet="""
guard = stepguard.watch(model, optimizer)
loss = guard.loss(loss_fn, batch)  # in place of loss = loss_fn(batch)
""",
)
"""Where a watched loop computed the bad value outside the model."""

SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.-=+*#@"


def verdict_title(kind: str) -> str:
    """`nonfinite_loss` as people say it; notes may be of other kinds than verdicts."""
    return VERDICT_TITLES.get(kind, kind.replace("_", " "))


def number(value: float | None) -> str:
    """Four significant digits, whole numbers in full, or nan, inf, -inf; `-` for None."""
    return "-" if value is None else records.number(value)


def rates(
    lr: Sequence[float], schedule: str = "", *, words: Callable[[float], str] = number
) -> str:
    """The learning rate of each group, one number where all share it, and where its schedule is."""
    shown = list(map(words, lr))
    if len(set(shown)) == 1:
        del shown[1:]
    if schedule:
        return f"{' / '.join(shown)} ({schedule})"
    return " / ".join(shown)


def metric_only(bad: Mapping[str, float], step: int) -> str:
    """Recorded numbers that are NaN or Inf while the training is unharmed."""
    values = ", ".join(f"{name} was logged as {value}" for name, value in bad.items())
    return (
        f"{values} at step {step}: only the logged value is wrong; loss, gradients "
        "and weights are finite (reported once)"
    )


def count(amount: int, noun: str) -> str:
    """`1 step`, `3 steps`, `12,345 steps`."""
    plural = "" if amount == 1 else "s"
    return f"{amount:,} {noun}{plural}"


def size(count: float) -> str:
    """Put a number of bytes into words: `2.1 GB`."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} TB"


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, ..."""
    if 10 <= n % 100 <= 20:
        return f"{n}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def moment(value: object) -> str:
    """Seconds since 1970 as local time with its zone; anything else as it is."""
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value).astimezone().isoformat(sep=" ", timespec="seconds")
    return str(value or "")


def culprits_of(incident: Incident) -> str:
    """Sample, micro-batch and rank of an incident, where they could be confirmed."""
    if incident.origin is None:
        return ""
    return culprits(incident.origin, len(incident.reading.micro_losses))


def culprits(origin: Origin, micro_batches: int = 0) -> str:
    """Sample, micro-batch and rank; `micro_batches` of the step, 0 where it is not known."""
    parts = []
    if origin.samples:
        noun = "sample" if len(origin.samples) == 1 else "samples"
        named = f"{noun} {first_few(origin.samples)}"
        if origin.rows:
            # Characters of a sample's row and id; longer ones lose their middle
            named += f" = {first_few((middle(row, 40) for row in origin.rows), 4)}"
            if origin.rows[0].startswith("row "):
                named += " of the data set"
        parts.append(named)
    if origin.micro_batch is not None and micro_batches != 1:
        # People count from 1.
        of = f" of {micro_batches}" if micro_batches else ""
        parts.append(f"micro-batch {origin.micro_batch + 1}{of}")
    if origin.rank is not None:
        parts.append(f"rank {origin.rank}")
    return ", ".join(parts)


def joined(parts: Iterable[str], separator: str = ", ") -> str:
    """The parts that are not empty, in one text."""
    return separator.join(filter(None, parts))


def first_few(items: Iterable[object], most: int = 8) -> str:
    """The first few of a list, and how many more there are."""
    listed = list(map(str, items))
    shown = ", ".join(listed[:most])
    if len(listed) > most:
        shown += f" and {len(listed) - most} more"
    return shown


def kind_of(incident: Incident) -> tuple[str, ...]:
    """Incidents with the same key are the same trouble again: same verdict, place and cause."""
    code = incident.findings[0].code if incident.findings else ""
    origin = incident.origin
    if origin is None:
        return (incident.verdict.kind, "", "", "", code)
    what = origin.op or origin.tensor or ""
    return (incident.verdict.kind, what, origin.module or "", origin.source or "", code)


def sparkline(values: Sequence[float], *, plain: bool = False) -> str:
    """One character a value, `!` where it is not finite; a log scale where they span a decade."""
    marks = ASCII_SPARKS if plain else SPARKS
    usable = list(filter(math.isfinite, values))
    low, high = min(usable, default=0.0), max(usable, default=0.0)
    scaled: Callable[[float], float] = math.log if high > 10 * low > 0 else float
    drawn = ""
    for value in values:
        if not math.isfinite(value):
            drawn += "!"
            continue
        share = (scaled(value) - scaled(low)) / ((scaled(high) - scaled(low)) or 1.0)
        drawn += marks[round(share * (len(marks) - 1))]
    return drawn


# --- What was done about an incident, in words: one table for every output.


class ActionWords(NamedTuple):
    """One action in the words of each output."""

    done: str
    """After `step 48`: what was done."""
    effect: str
    """What that means for the state in memory."""
    log: str
    """The line of the readable log."""


ACTION_WORDS: dict[Action, ActionWords] = {
    "leave_out": ActionWords(
        "continued without the bad part",
        "the update was made from the rest of the step",
        "Continuing without the bad part",
    ),
    "retry": ActionWords(
        "run again",
        "the replay is clean, so the same step is run once more with the same random numbers",
        "Running the same step once more",
    ),
    "skip": ActionWords(
        "skipped",
        "weights, optimizer state and buffers are as before the step",
        "Skipping batch and resetting gradients",
    ),
    "undo": ActionWords(
        "update taken back",
        "weights, optimizer state and buffers are as before the step",
        "Taking the update back",
    ),
    "heal": ActionWords(
        "healed from a healthy rank",
        "all ranks hold the weights and optimizer state of one that was undamaged",
        "Healing the damaged rank from a healthy one",
    ),
    "rewind": ActionWords(
        "rewound",
        "model, optimizer, schedule and buffers are back at a state that was good",
        "Rewinding to the last good snapshot",
    ),
    "stop": ActionWords(
        "stopped the run",
        "weights are those from before the bad step",
        "Stopping training to prevent corruption...",
    ),
    "note": ActionWords("reported, no action taken", "the update was made", "Continuing"),
}
"""A test holds this table against the actions there are."""

REWIND_DATA = {
    "repeat": "; the steps since are replayed unchanged",
    "skip": "; training continues with the next batch",
}


def done(decision: Decision) -> str:
    """What was done: which part was left out, where a rewind went."""
    if decision.action == "leave_out" and decision.left_out:
        return f"continued without {decision.left_out}"
    if decision.action == "rewind" and decision.rewound_to is not None:
        return f"rewound to step {decision.rewound_to}"
    return ACTION_WORDS[decision.action].done


def done_times(actions: Mapping[Action, int]) -> str:
    """`skipped 3, rewound 1`."""
    return ", ".join(f"{ACTION_WORDS[action].done} {times}" for action, times in actions.items())


def effect(incident: Incident) -> str:
    """What the decision means for the state in memory."""
    decision = incident.decision
    if decision is None:
        return ""
    steps = count(decision.rewound_to or 0, "step")
    if decision.action == "stop" and decision.rewound_to is not None:
        return f"the weights are those after {steps}, the newest without the damage"
    if incident.reading.bad_state and decision.action in ("stop", "note"):
        damaged = first_few(incident.reading.bad_state, 2)
        return f"the state in memory is damaged ({damaged}): restore a good checkpoint"
    if decision.rewound_to is not None:
        since = REWIND_DATA.get(decision.data or "", "")
        return f"everything is as it was after {steps}{since}"
    if decision.not_restored:
        return f"the update was vetoed, but {decision.not_restored}"
    return ACTION_WORDS[decision.action].effect


def changes(decision: Decision) -> list[str]:
    """Why it was decided, and what was changed with it."""
    words = [decision.reason]
    if decision.lr_factor is not None:
        words.append(f"every learning rate times {decision.lr_factor:g}")
    if decision.new_scale is not None:
        words.append(f"loss scale is now {decision.new_scale:g}")
    return list(filter(None, words))


def budget(decision: Decision, policy: Policy | None = None) -> str:
    """How many incidents so far; of how many, where the policy is known."""
    row = str(decision.consecutive)
    total = str(decision.total)
    if policy is not None and policy.max_consecutive is not None:
        row += f" of {policy.max_consecutive}"
    if policy is not None and policy.max_total is not None:
        total += f" of {policy.max_total}"
    return f"{row} in a row, {total} in this run"


def next_commands(incident: Incident) -> list[str]:
    """What to type next, most telling first; only what this incident has files for."""
    commands = []
    if incident.run and incident.capsule and incident.replayable:
        path = incident.capsule
        origin = incident.origin
        if origin is not None and origin.rank not in (None, incident.rank):
            # The capsule of this rank holds a step that was healthy here.
            suffix = f"-rank{origin.rank}" if origin.rank else ""
            path = f"incidents/{incident.id}{suffix}/capsule"
        capsule = shlex.quote(f"{incident.run}/{path}")
        if any(remedy.proven for remedy in first_remedies(incident)):
            commands.append(f"stepguard fix {capsule}")
        commands.append(f"stepguard replay {capsule}")
    if incident.findings:
        commands.append(f"stepguard explain {incident.findings[0].code}")
    if incident.run:
        commands.append(f"stepguard report {shlex.quote(incident.run)}")
    return commands


def first_remedies(incident: Incident) -> tuple[Remedy, ...]:
    """What is worth trying first."""
    if incident.findings:
        return incident.findings[0].remedies[:2]
    origin = incident.origin
    return (HAND_OVER,) if origin is not None and origin.evidence.loss_unseen else ()


# --- One-line messages to people about incidents, notes, stops and faults of the guard's own.


STOPPING = "Stopping training to prevent corruption"


def incident_line(incident: Incident, counted: str = "", *, again: bool = False) -> str:
    """One line about an incident; `counted`: which of its kind it is, `again`: done as before."""
    decision = incident.decision
    line = f"step {incident.step} is bad"
    if decision is not None:
        line = f"step {incident.step} {done(decision)}"
    if again:
        line += " again"
    if counted:
        line += f" ({counted})"
    parts = [incident.verdict.summary or verdict_title(incident.verdict.kind)]
    origin = incident.origin
    if origin is not None and not incident.verdict.finite_anomaly:
        parts.append(place(origin))
        # the summary of a bad loss names its only bad micro-batch already
        named = incident.reading.bad_micro_batches == (origin.micro_batch,)
        if named and incident.verdict.kind in ("nonfinite_loss", "nonfinite_input"):
            origin = replace(origin, micro_batch=None)
        parts.append(culprits(origin, len(incident.reading.micro_losses)))
    if incident.findings:
        parts.append(incident.findings[0].code)
    if decision is not None:
        parts.append(decision.reason)
    return f"{line}: {joined(parts, '; ')}"


def message(kind: str, fields: Mapping[str, Any]) -> str:
    """One line about a note, or about a `fault`: the guard itself failed. Others have none."""
    if kind == "fault":
        return (
            "ERROR: the guard failed and is disarmed; training continues unguarded: "
            f"{fields.get('error')}"
        )
    return f"step {fields.get('step')}: {fields.get('summary')}"


def stopping(incident: Incident) -> str:
    """Say that the policy stops the run, and why."""
    line = f"{STOPPING} at step {incident.step}"
    if incident.decision is not None and incident.decision.reason:
        line += f": {incident.decision.reason}"
    return line

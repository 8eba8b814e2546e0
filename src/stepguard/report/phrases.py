"""How numbers, tensors, places and decisions are put into words. Every output uses the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from stepguard.records import Decision, Incident, Operand, Origin, Policy
from stepguard.report.unbroken import middle

STOPPING = "Stopping training to prevent corruption"
LONGEST_IDENTITY = 40
"""Characters of a sample's row and id; longer ones lose their middle."""

VERDICT_TITLES: dict[str, str] = {
    "nonfinite_input": "non-finite input",
    "nonfinite_loss": "non-finite loss",
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
}

ACTION_DONE: dict[str, str] = {
    "leave_out": "went on without what was bad",
    "retry": "run again",
    "skip": "skipped",
    "undo": "update taken back",
    "rewind": "rewound",
    "lower_lr": "skipped, learning rate lowered",
    "stop": "stopped the run",
    "note": "told, nothing done",
}

ACTION_EFFECT: dict[str, str] = {
    "leave_out": "the update was made from the rest of the step",
    "undo": "weights, optimizer state and buffers are as before the step",
    "retry": "the replay is clean, so the same step is run once more with the same random numbers",
    "skip": "weights, optimizer state and buffers are as before the step",
    "rewind": "model, optimizer, schedule and buffers are back at a state that was good",
    "lower_lr": "weights are as before the step",
    "stop": "weights are those from before the bad step",
    "note": "the update was made",
}

REWIND_DATA: dict[str, str] = {
    "repeat": "; the steps since run again as they were",
    "skip": "; training goes on with the next batch",
    "reorder": "; the steps since run again in another order, without the bad one",
}

SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.-=+*#@"


def verdict_title(kind: str) -> str:
    """`nonfinite_loss` as people say it."""
    return VERDICT_TITLES.get(kind, kind.replace("_", " "))


def number(value: float | None) -> str:
    """Four significant digits, whole numbers in full, or nan, inf, -inf; `-` where nothing is
    known.
    """
    if value is None:
        return "-"
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e9
    return str(int(value)) if whole else f"{value:.4g}"


def rates(lr: Sequence[float]) -> str:
    """The learning rate of each group; one number where all groups share it."""
    shown = [f"{rate:.2e}" for rate in lr]
    return shown[0] if shown and len(set(shown)) == 1 else " / ".join(shown)


def count(amount: int, noun: str) -> str:
    """`1 step`, `3 steps`, `12,345 steps`."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


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
    ending = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def finite(value: object) -> bool:
    """True for a finite number; False for NaN, Inf and everything that is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def moment(value: object) -> str:
    """Seconds since 1970 as local time with its zone; anything else as it is."""
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value).astimezone().isoformat(sep=" ", timespec="seconds")
    return str(value or "")


def operand(value: Operand) -> str:
    """dtype, shape, what is wrong in it, and the range of what is not."""
    parts = [" ".join(part for part in (value.dtype, _brackets(value.shape)) if part)]
    if value.value is not None:
        parts.append(
            number(value.value)
            + (f" at {_brackets(value.index)}" if value.index is not None else "")
        )
    bad = [
        f"{n:,} {kind}"
        for n, kind in ((value.nan, "NaN"), (value.posinf, "+Inf"), (value.neginf, "-Inf"))
        if n
    ]
    if bad:
        parts.append(", ".join(bad) + _share_of(value))
    if value.zeros:
        parts.append(count(value.zeros, "zero"))
    if value.min is not None and value.max is not None and (value.shape or value.value is None):
        parts.append(f"finite {number(value.min)} to {number(value.max)}")
    return "; ".join(part for part in parts if part)


def _brackets(indices: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, indices))}]" if indices else ""


def _share_of(value: Operand) -> str:
    total = math.prod(value.shape)
    return f" of {total:,}" if value.shape and total else ""


def place(origin: Origin) -> str:
    """`aten._softmax in layers.3.attn at model.py:88`, as far as it is known."""
    what = origin.tensor or origin.op or ""
    if origin.node:
        what = f"{what} ({origin.node})" if what else origin.node
    words = [what] if what else []
    if origin.module is not None:
        words.append(f"in {origin.module or 'the model itself'}")
    if origin.source:
        words.append(f"at {origin.source}")
    return " ".join(words)


def culprits(origin: Origin) -> str:
    """Sample, micro-batch and rank, where they could be confirmed."""
    parts = []
    if origin.samples:
        parts.append(
            f"{'sample' if len(origin.samples) == 1 else 'samples'} "
            f"{first_few(origin.samples)}{_who(origin)}"
        )
    if origin.micro_batch is not None:
        parts.append(f"micro-batch {origin.micro_batch}")
    if origin.rank is not None:
        parts.append(f"rank {origin.rank}")
    return ", ".join(parts)


def _who(origin: Origin) -> str:
    """` = row 48211 of the data set`, where the loader or the batch says who the samples are."""
    if not origin.rows:
        return ""
    named = first_few((middle(row, LONGEST_IDENTITY) for row in origin.rows), 4)
    return f" = {named}" + (" of the data set" if origin.rows[0].startswith("row ") else "")


def first_few(items: Iterable[object], most: int = 8) -> str:
    """The first few of a list, and how many more there are."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def budget(decision: Decision, policy: Policy | None = None) -> str:
    """How many incidents so far; of how many, where the policy is known."""
    row = str(decision.consecutive)
    total = str(decision.total)
    if policy is not None and policy.max_consecutive is not None:
        row += f" of {policy.max_consecutive}"
    if policy is not None and policy.max_total is not None:
        total += f" of {policy.max_total}"
    return f"{row} in a row, {total} in this run"


def done(decision: Decision) -> str:
    """What was done, and for a part that was left out, which."""
    if decision.action == "leave_out" and decision.left_out:
        return f"went on without {decision.left_out}"
    return ACTION_DONE.get(decision.action, decision.action)


def effect(incident: Incident) -> str:
    """What the decision means for the state in memory."""
    action = incident.decision.action if incident.decision else ""
    back = incident.decision.rewound_to if incident.decision else None
    if action == "stop" and back is not None:
        return f"the weights are those after {count(back, 'step')}, the newest without the damage"
    if incident.reading.bad_state and action in ("stop", "note"):
        return (
            f"the state in memory is damaged ({first_few(incident.reading.bad_state, 2)}): "
            f"restore a good checkpoint"
        )
    if incident.decision is not None and incident.decision.rewound_to is not None:
        return rewound(incident.decision)
    if incident.decision is not None and incident.decision.not_restored:
        return f"the update was vetoed, but {incident.decision.not_restored}"
    return ACTION_EFFECT.get(action, "")


def rewound(decision: Decision) -> str:
    """Where a rewind went, and what became of the steps since."""
    since = REWIND_DATA.get(decision.data or "", "")
    return f"everything is as it was after {count(decision.rewound_to or 0, 'step')}{since}"


def kind_of(incident: Incident) -> tuple[str, ...]:
    """Incidents with the same key are the same trouble again: same verdict, birthplace and cause."""
    origin = incident.origin
    where = (
        (origin.op or origin.tensor or "", origin.module or "", origin.source or "")
        if origin
        else ("", "", "")
    )
    return (incident.verdict.kind, *where, incident.findings[0].code if incident.findings else "")


def incident_line(incident: Incident, counted: str = "", *, again: bool = False) -> str:
    """One line about an incident; `counted`: which of its kind it is, `again`: done as before."""
    decision = incident.decision
    line = f"step {incident.step} {done(decision) if decision else 'is bad'}"
    if again:
        line += " again"
    if counted:
        line += f" ({counted})"
    line += f": {_gist(incident)}"
    if decision is not None and decision.reason:
        line += f"; {decision.reason}"
    return line


def _gist(incident: Incident) -> str:
    parts = [incident.verdict.summary or verdict_title(incident.verdict.kind)]
    if incident.origin is not None:
        parts.append(place(incident.origin))
        parts.append(culprits(incident.origin))
    if incident.findings:
        parts.append(incident.findings[0].code)
    return "; ".join(part for part in parts if part)


def note_line(fields: Mapping[str, Any]) -> str:
    """One line about a note of the journal."""
    return f"step {fields.get('step')}: {fields.get('summary')}"


def disarmed(fields: Mapping[str, Any]) -> str:
    """One line about a `fault` line of the journal: the guard itself failed."""
    return (
        "ERROR: the guard failed and is disarmed; training goes on unguarded: "
        f"{fields.get('error')}"
    )


def stopping(incident: Incident) -> str:
    """Say that the policy stops the run, and why."""
    line = f"{STOPPING} at step {incident.step}"
    if incident.decision is not None and incident.decision.reason:
        line += f": {incident.decision.reason}"
    return line


def sparkline(values: Sequence[float], *, plain: bool = False) -> str:
    """One character a value, `!` where it is not finite; on a log scale where the values span over
    a decade.
    """
    usable = [value for value in values if math.isfinite(value)]
    if not usable:
        return "!" * len(values)
    marks = ASCII_SPARKS if plain else SPARKS
    on_log = min(usable) > 0 and max(usable) / min(usable) > 10
    heights = [math.log(value) for value in usable] if on_log else usable
    low, span = min(heights), (max(heights) - min(heights)) or 1.0
    drawn = iter(marks[round((height - low) / span * (len(marks) - 1))] for height in heights)
    return "".join(next(drawn) if math.isfinite(value) else "!" for value in values)

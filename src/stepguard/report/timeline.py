"""The run as a chain of events: what led to what, from the first warning to how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepguard.records.place import place
from stepguard.report import phrases
from stepguard.report.decision_words import done
from stepguard.report.story import Branch, Note, Run, StoryIncident

Weight = Literal["info", "note", "incident", "good"]
RISE = 4.0
"""Times above its usual level that make a gradient norm part of the story."""
LOOK_BACK = 50
LATEST = 10**15
"""Sorts an event behind everything that was written by then."""

Placed = tuple[int, int, "Event"]
"""Rows before it, order among the lines, event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One link of the chain."""

    step: int
    text: str
    weight: Weight = "info"
    last_step: int | None = None
    """Where the event lasted for more than one step."""

    @property
    def steps(self) -> str:
        """`step 48`, or `steps 48-51`; after a rewind the last may be the lower one."""
        if self.last_step is None or self.last_step <= self.step:
            return f"step {self.step}"
        return f"steps {self.step}-{self.last_step}"


def timeline(run: Run) -> tuple[Event, ...]:
    """Every event in the order of time."""
    placed = [
        *_beginning(run),
        *_rise(run),
        *_stretches(run),
        *_goings_back(run),
        *_noted(run),
        *_ending(run),
        *_killed(run),
    ]
    placed.sort(key=lambda event: event[:2])
    return tuple(event for _, _, event in placed)


def _beginning(run: Run) -> Iterator[Placed]:
    table = run.steps
    if not len(table):
        return
    text = "the run began"
    when = phrases.moment(run.began)
    if when:
        text += f" at {when}"
    loss = table.column("loss")
    if len(loss) and loss.rows[0] == 0:
        text += f", loss {phrases.number(float(loss.values[0]))}"
    yield -1, 0, Event(step=int(table.step[0]), text=text)


def _rise(run: Run) -> Iterator[Placed]:
    """The gradient norm leaving its usual level just before the first incident."""
    if not run.incidents:
        return
    first = run.incidents[0]
    end = first.at if first.row is None else first.row
    window = np.zeros(len(run.steps), np.bool_)
    window[max(end - LOOK_BACK, 0) : end] = True
    series = run.steps.column("grad_norm").where(window)
    rows = series.rows[series.finite]
    norms = series.values[series.finite]
    if len(norms) < 8:
        return
    # The first half of the window stands for the level before anything went wrong.
    usual = float(np.median(norms[: len(norms) // 2]))
    onset = len(norms)
    while onset > 0 and norms[onset - 1] > RISE * usual > 0:
        onset -= 1
    if onset == len(norms):
        return
    peak = phrases.number(float(norms[onset:].max()))
    text = f"the gradient norm rose from its usual {phrases.number(usual)} to {peak}"
    steps = run.steps.step[rows[onset:]]
    event = Event(step=int(steps[0]), last_step=int(steps[-1]), text=text, weight="note")
    yield int(rows[onset]), 0, event


def _stretches(run: Run) -> Iterator[Placed]:
    """Incidents in a row that are of one kind and were answered alike are one event."""
    seen: set[tuple[str, ...]] = set()
    members: list[StoryIncident] = []
    for one in run.incidents:
        if members and not _same_stretch(members[-1], one):
            yield _stretch(members, seen)
            members = []
        members.append(one)
    if members:
        yield _stretch(members, seen)


def _same_stretch(before: StoryIncident, now: StoryIncident) -> bool:
    if phrases.kind_of(before.incident) != phrases.kind_of(now.incident):
        return False
    if before.row is not None and now.row is not None:
        together = now.row - before.row == 1
    else:
        together = 0 <= now.incident.step - before.incident.step <= 1
    same = _answer(before) == _answer(now) and before.attempt == now.attempt
    return together and same and before.done != "rewound"


def _answer(one: StoryIncident) -> str:
    """What was done; a rewind says to where."""
    decision = one.incident.decision
    if decision is None:
        return ""
    words = done(decision)
    if decision.action == "rewind" and decision.rewound_to is not None:
        words = f"rewound to step {decision.rewound_to}"
    return words


def _stretch(members: list[StoryIncident], seen: set[tuple[str, ...]]) -> Placed:
    first = members[0]
    last = members[-1].incident
    kind = phrases.kind_of(first.incident)
    verdict = first.incident.verdict
    parts = [verdict.summary or phrases.verdict_title(verdict.kind)]
    if kind not in seen:
        parts += _place_and_cause(first)
    seen.add(kind)
    answer = _answer(first)
    if answer:
        if len(members) > 1:
            answer += f" {len(members)} times"
        if last.decision is not None and last.decision.reason:
            answer += f" ({last.decision.reason})"
        parts.append(answer)
    step = first.incident.step
    event = Event(step=step, last_step=last.step, text="; ".join(parts), weight="incident")
    return first.at, first.order, event


def _place_and_cause(one: StoryIncident) -> list[str]:
    parts = []
    origin = one.incident.origin
    if origin is not None:
        where = phrases.joined([place(origin), phrases.culprits_of(one.incident)])
        text = f"born in {origin.phase}"
        if where:
            text += f": {where}"
        parts.append(text)
    if one.incident.findings:
        finding = one.incident.findings[0]
        parts.append(f"{finding.code} {finding.title}")
    return parts


def _goings_back(run: Run) -> Iterator[Placed]:
    """Restarts, and rewinds that no incident tells of."""
    for branch in run.branches:
        left = branch.left
        if left is None or left.incident is not None:
            continue
        order = LATEST if left.by == "restart" else LATEST - 1
        event = Event(step=left.to, text=_back_text(run, branch), weight="note")
        yield branch.end_row, order, event


def _back_text(run: Run, branch: Branch) -> str:
    left = branch.left
    assert left is not None
    table = run.steps
    lost = int((table.committed[branch.rows] & (table.step[branch.rows] >= left.to)).sum())
    if left.by == "restart":
        text = f"started again at step {left.to}"
        ending = run.attempts[branch.attempt].ending
        if ending == "killed":
            text += ", after a process that left no word"
    elif left.by == "repeat":
        text = f"went back to step {left.to}"
    else:
        text = left.text or f"went back to step {left.to}"
    if lost:
        text += f"; {phrases.count(lost, 'step')} of before no longer count"
    return text


def _noted(run: Run) -> Iterator[Placed]:
    """Notes of one kind are one event; everything else in the journal is an event of its own."""
    kinds: dict[str, list[Note]] = {}
    for position, note in enumerate(run.notes):
        # Rewinds and restarts are told as such; sealed checkpoints are what should happen.
        if note.type in ("rewind", "checkpoint") or note.kind == "restored":
            continue
        name = f"line {position}"
        if note.type == "note":
            name = f"{note.attempt} {note.kind}"
        kinds.setdefault(name, []).append(note)
    for notes in kinds.values():
        first = notes[0]
        text = _text_of(first)
        if len(notes) > 1:
            text += f" ({len(notes)} times)"
        event = Event(
            step=_step_of(run, first),
            last_step=_step_of(run, notes[-1]),
            text=text,
            weight=_weight(first),
        )
        # The end is the last word of an attempt, whatever the threads of it still wrote.
        yield first.at, LATEST - 2 if first.type == "end" else first.order, event


def _step_of(run: Run, note: Note) -> int:
    """Lines on the whole run (its end) carry no step of their own."""
    if note.step is not None:
        return note.step
    return int(run.steps.step[note.at - 1]) if 0 < note.at <= len(run.steps) else 0


def _text_of(note: Note) -> str:
    if note.type == "note":
        return note.text or phrases.verdict_title(note.kind or "note")
    if note.type == "fault":
        return f"the guard failed and was disarmed: {note.text}".rstrip(": ")
    if note.type == "end":
        return _end_text(note)
    return f"{note.type}: {note.text}".rstrip(": ")


def _end_text(note: Note) -> str:
    if note.fields.get("error"):
        return f"the run was ended by an exception: {note.fields['error']}"
    if note.fields.get("signal"):
        return f"the run was ended by {note.fields['signal']}"
    if note.fields.get("armed", True):
        return "the guard was closed"
    return "the disarmed guard was closed"


def _weight(note: Note) -> Weight:
    """Only what the guard noticed is coloured; a saved checkpoint is neither good nor bad."""
    if note.type == "end" and note.fields.get("error"):
        return "incident"
    by_type: dict[str, Weight] = {"fault": "incident", "note": "note"}
    return by_type.get(note.type, "info")


def _ending(run: Run) -> Iterator[Placed]:
    """What came after the last incident, or that nothing went wrong."""
    table = run.steps
    if not len(table):
        return
    end = int(table.step[-1])
    if not run.incidents:
        yield len(table), LATEST - 3, _ending_without(run, end)
        return
    last = run.incidents[-1]
    since = last.at if last.row is None else last.row + 1
    after = np.flatnonzero(table.committed[since:]) + since
    if not len(after):
        text = "no step was committed after the last incident"
        yield len(table), LATEST - 3, Event(step=end, text=text, weight="incident")
        return
    text = f"{phrases.count(len(after), 'step')} committed since the last incident"
    loss = table.last("loss")
    if loss is not None:
        text += f", the last with loss {phrases.number(loss)}"
    event = Event(step=int(table.step[after[0]]), last_step=end, text=text, weight="good")
    yield int(after[0]), LATEST - 4, event


def _killed(run: Run) -> Iterator[Placed]:
    if run.attempts and run.attempts[-1].ending == "killed" and run.last_step is not None:
        text = "the process is gone, and left no end record"
        yield len(run.steps), LATEST, Event(step=run.last_step, text=text, weight="incident")


def _ending_without(run: Run, end: int) -> Event:
    how = "no incident"
    weight: Weight = "good"
    if run.attempts and run.attempts[-1].error:
        how = "then an exception outside of a step ended the run"
        weight = "incident"
    made = int(run.steps.committed.sum())
    text = f"{phrases.count(made, 'step')} committed, {how}"
    return Event(step=end, text=text, weight=weight)

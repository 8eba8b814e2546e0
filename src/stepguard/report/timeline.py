"""The run as a chain of events: what led to what, from the first warning to how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from stepguard.records import Incident
from stepguard.records.place import place
from stepguard.report import phrases
from stepguard.report.decision_words import ACTION_WORDS
from stepguard.report.step_lines import StepLine, committed, finite_values

Weight = Literal["info", "note", "incident", "good"]
RISE = 4.0
"""Times above its usual level that make a gradient norm part of the story."""
LOOK_BACK = 50
WORDS = ("summary", "error", "message", "reason", "detail", "status", "path")
"""Fields of a journal line that can be shown as they are, best first."""


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
        """`step 48`, or `steps 48-51`."""
        if self.last_step is None or self.last_step == self.step:
            return f"step {self.step}"
        return f"steps {self.step}-{self.last_step}"


def timeline(
    header: Mapping[str, Any],
    steps: Sequence[StepLine],
    incidents: Sequence[Incident],
    notes: Sequence[Mapping[str, Any]],
) -> tuple[Event, ...]:
    """Every event in the order of its first step; within one step, causes before effects."""
    events = [
        *_beginning(header, steps),
        *_rise(steps, incidents),
        *_stretches(incidents),
        *_noted(notes, max((line["step"] for line in steps), default=0)),
        *_ending(steps, incidents, ended_by=_error_at_the_end(notes)),
    ]
    return tuple(sorted(events, key=lambda event: event.step))


def _beginning(header: Mapping[str, Any], steps: Sequence[StepLine]) -> Iterator[Event]:
    if not steps:
        return
    text = "the run began"
    when = phrases.moment(header.get("time"))
    if when:
        text += f" at {when}"
    loss = steps[0].get("loss")
    if loss is not None:
        text += f", loss {phrases.number(loss)}"
    yield Event(step=steps[0]["step"], text=text)


def _rise(steps: Sequence[StepLine], incidents: Sequence[Incident]) -> Iterator[Event]:
    """The gradient norm leaving its usual level just before the first incident."""
    if not incidents:
        return
    first = min(incident.step for incident in incidents)
    lines = []
    for line in steps:
        if first - LOOK_BACK <= line["step"] < first and phrases.finite(line.get("grad_norm")):
            lines.append(line)
    if len(lines) < 8:
        return
    norms = finite_values(lines, "grad_norm")
    # The first half of the window stands for the level before anything went wrong.
    usual = median(norms[: len(norms) // 2])
    onset = len(norms)
    while onset > 0 and norms[onset - 1] > RISE * usual > 0:
        onset -= 1
    if onset == len(norms):
        return
    peak = phrases.number(max(norms[onset:]))
    text = f"the gradient norm rose from its usual {phrases.number(usual)} to {peak}"
    yield Event(step=lines[onset]["step"], last_step=lines[-1]["step"], text=text, weight="note")


def _stretches(incidents: Sequence[Incident]) -> Iterator[Event]:
    """Incidents in a row that are of one kind and were answered alike are one event."""
    seen: set[tuple[str, ...]] = set()
    members: list[Incident] = []
    for incident in incidents:
        if members and not _same_stretch(members[-1], incident):
            yield _stretch(members, seen)
            members = []
        members.append(incident)
    if members:
        yield _stretch(members, seen)


def _same_stretch(before: Incident, now: Incident) -> bool:
    if now.step - before.step > 1 or phrases.kind_of(before) != phrases.kind_of(now):
        return False
    if before.decision is None or now.decision is None:
        return before.decision is now.decision
    return before.decision.action == now.decision.action


def _stretch(members: list[Incident], seen: set[tuple[str, ...]]) -> Event:
    first = members[0]
    last = members[-1]
    kind = phrases.kind_of(first)
    parts = [first.verdict.summary or phrases.verdict_title(first.verdict.kind)]
    if kind not in seen:
        parts += _place_and_cause(first)
    seen.add(kind)
    if first.decision is not None:
        answer = ACTION_WORDS[first.decision.action].done
        if len(members) > 1:
            answer += f" {len(members)} times"
        if last.decision is not None and last.decision.reason:
            answer += f" ({last.decision.reason})"
        parts.append(answer)
    return Event(step=first.step, last_step=last.step, text="; ".join(parts), weight="incident")


def _place_and_cause(incident: Incident) -> list[str]:
    parts = []
    if incident.origin is not None:
        born = [place(incident.origin), phrases.culprits(incident.origin)]
        where = phrases.joined(born)
        text = f"born in {incident.origin.phase}"
        if where:
            text += f": {where}"
        parts.append(text)
    if incident.findings:
        parts.append(f"{incident.findings[0].code} {incident.findings[0].title}")
    return parts


def _noted(notes: Sequence[Mapping[str, Any]], end: int) -> Iterator[Event]:
    """Notes of one kind are one event; everything else in the journal is an event of its own."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for position, line in enumerate(notes):
        if line.get("type") == "run":
            continue  # started again: it has no step, the summary counts it
        name = f"line {position}"
        if line.get("type") == "note":
            name = str(line.get("kind", ""))
        kinds.setdefault(name, []).append(line)
    for lines in kinds.values():
        text = _text_of(lines[0])
        if len(lines) > 1:
            text += f" ({len(lines)} times)"
        yield Event(
            step=_step_of(lines[0], end),
            last_step=_step_of(lines[-1], end),
            text=text,
            weight=_weight(lines[0]),
        )


def _step_of(line: Mapping[str, Any], end: int) -> int:
    """Lines on the whole run (its end) carry no step of their own."""
    step = line.get("step")
    return step if isinstance(step, int) else end


def _text_of(line: Mapping[str, Any]) -> str:
    words = next((str(line[name]) for name in WORDS if line.get(name)), "")
    kind = str(line.get("type", "note"))
    if kind == "note":
        return words or phrases.verdict_title(str(line.get("kind", "note")))
    if kind == "fault":
        return f"the guard failed and was disarmed: {words}".rstrip(": ")
    if kind == "end":
        return _end_text(line)
    return f"{kind}: {words}".rstrip(": ")


def _end_text(line: Mapping[str, Any]) -> str:
    if line.get("error"):
        return f"the run was ended by an exception: {line['error']}"
    if line.get("armed", True):
        return "the guard was closed"
    return "the disarmed guard was closed"


def _weight(line: Mapping[str, Any]) -> Weight:
    """Only what the guard noticed is coloured; a saved checkpoint is neither good nor bad."""
    if line.get("type") == "end" and line.get("error"):
        return "incident"
    by_type: dict[str, Weight] = {"fault": "incident", "note": "note", "rewind": "note"}
    return by_type.get(str(line.get("type")), "info")


def _error_at_the_end(notes: Sequence[Mapping[str, Any]]) -> str:
    """The exception that ended the last attempt, in words."""
    for line in reversed(notes):
        if line.get("type") == "end":
            return str(line.get("error") or "")
    return ""


def _ending(
    steps: Sequence[StepLine], incidents: Sequence[Incident], *, ended_by: str = ""
) -> Iterator[Event]:
    """What came after the last incident, or that nothing went wrong."""
    if not steps:
        return
    end = max(line["step"] for line in steps)
    made = committed(steps)
    if not incidents:
        how = "no incident"
        weight: Weight = "good"
        if ended_by:
            how = "then an exception outside of a step ended the run"
            weight = "incident"
        text = f"{phrases.count(len(made), 'step')} committed, {how}"
        yield Event(step=end, text=text, weight=weight)
        return
    last_bad = max(incident.step for incident in incidents)
    after = [line for line in made if line["step"] > last_bad]
    if not after:
        text = "no step was committed after the last incident"
        yield Event(step=end, text=text, weight="incident")
        return
    text = f"{phrases.count(len(after), 'step')} committed since the last incident"
    if "loss" in after[-1]:
        text += f", the last with loss {phrases.number(after[-1]['loss'])}"
    yield Event(step=after[0]["step"], last_step=end, text=text, weight="good")

"""The run as a chain of events: what led to what, from the first warning to how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from stepguard.records import Incident
from stepguard.report import phrases

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
    steps: Sequence[Mapping[str, Any]],
    incidents: Sequence[Incident],
    notes: Sequence[Mapping[str, Any]],
) -> tuple[Event, ...]:
    """Every event in the order of its first step; events of one step in the order of cause and
    effect.
    """
    events = [
        *_beginning(header, steps),
        *_rise(steps, incidents),
        *_stretches(incidents),
        *_noted(notes, max((line["step"] for line in steps), default=0)),
        *_ending(steps, incidents, ended_by=_error_at_the_end(notes)),
    ]
    return tuple(sorted(events, key=lambda event: event.step))


def _beginning(header: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    if not steps:
        return
    when = phrases.moment(header.get("time"))
    loss = steps[0].get("loss")
    text = "the run began" + (f" at {when}" if when else "")
    yield Event(
        step=steps[0]["step"],
        text=text + (f", loss {phrases.number(loss)}" if loss is not None else ""),
    )


def _rise(steps: Sequence[Mapping[str, Any]], incidents: Sequence[Incident]) -> Iterator[Event]:
    """The gradient norm leaving its usual level just before the first incident."""
    if not incidents:
        return
    first = min(incident.step for incident in incidents)
    norms = [
        (line["step"], line["grad_norm"])
        for line in steps
        if first - LOOK_BACK <= line["step"] < first and phrases.finite(line.get("grad_norm"))
    ]
    if len(norms) < 8:
        return
    usual = median(norm for _, norm in norms[: len(norms) // 2])
    onset = len(norms)
    while onset > 0 and norms[onset - 1][1] > RISE * usual > 0:
        onset -= 1
    if onset == len(norms):
        return
    peak = max(norm for _, norm in norms[onset:])
    text = (
        f"the gradient norm rose from its usual {phrases.number(usual)} to {phrases.number(peak)}"
    )
    yield Event(step=norms[onset][0], last_step=norms[-1][0], text=text, weight="note")


def _stretches(incidents: Sequence[Incident]) -> Iterator[Event]:
    """Incidents in a row that are of one kind and were answered alike are one event."""
    seen: set[tuple[str, ...]] = set()
    members: list[Incident] = []
    for incident in incidents:
        if members and not _goes_on(members[-1], incident):
            yield _stretch(members, seen)
            members = []
        members.append(incident)
    if members:
        yield _stretch(members, seen)


def _goes_on(before: Incident, now: Incident) -> bool:
    alike = phrases.kind_of(before) == phrases.kind_of(now) and _action(before) == _action(now)
    return alike and now.step - before.step <= 1


def _action(incident: Incident) -> str:
    return incident.decision.action if incident.decision else ""


def _stretch(members: list[Incident], seen: set[tuple[str, ...]]) -> Event:
    first, last = members[0], members[-1]
    kind = phrases.kind_of(first)
    parts = [first.verdict.summary or phrases.verdict_title(first.verdict.kind)]
    if kind not in seen:
        parts += _birth(first)
    seen.add(kind)
    if first.decision is not None:
        times = f" {len(members)} times" if len(members) > 1 else ""
        reason = f" ({last.decision.reason})" if last.decision and last.decision.reason else ""
        parts.append(
            phrases.ACTION_DONE.get(first.decision.action, first.decision.action) + times + reason
        )
    return Event(step=first.step, last_step=last.step, text="; ".join(parts), weight="incident")


def _birth(incident: Incident) -> list[str]:
    parts = []
    if incident.origin is not None:
        born = ", ".join(
            part
            for part in (phrases.place(incident.origin), phrases.culprits(incident.origin))
            if part
        )
        parts.append(f"born in {incident.origin.phase}" + (f": {born}" if born else ""))
    if incident.findings:
        parts.append(f"{incident.findings[0].code} {incident.findings[0].title}")
    return parts


def _noted(notes: Sequence[Mapping[str, Any]], end: int) -> Iterator[Event]:
    """Notes of one kind are one event; everything else in the journal is an event of its own."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for line in notes:
        if line.get("type") == "run":
            continue  # started again: it has no step, the summary counts it
        name = (
            str(line.get("kind", ""))
            if line.get("type") == "note"
            else f"{line.get('type')}#{len(kinds)}"
        )
        kinds.setdefault(name, []).append(line)
    for lines in kinds.values():
        step, last = _step_of(lines[0], end), _step_of(lines[-1], end)
        times = f" ({len(lines)} times)" if len(lines) > 1 else ""
        yield Event(
            step=step, last_step=last, text=_told(lines[0]) + times, weight=_weight(lines[0])
        )


def _step_of(line: Mapping[str, Any], end: int) -> int:
    """Lines on the whole run (its end) carry no step of their own."""
    step = line.get("step")
    return step if isinstance(step, int) else end


def _told(line: Mapping[str, Any]) -> str:
    said = next((str(line[name]) for name in WORDS if line.get(name)), "")
    kind = str(line.get("type", "note"))
    if kind == "note":
        return said or phrases.verdict_title(str(line.get("kind", "note")))
    if kind == "fault":
        return f"the guard failed and was disarmed: {said}".rstrip(": ")
    if kind == "end" and line.get("error"):
        return f"the run was ended by an exception: {line['error']}"
    if kind == "end":
        return (
            "the guard was closed" if line.get("armed", True) else "the disarmed guard was closed"
        )
    return f"{kind}: {said}".rstrip(": ")


def _weight(line: Mapping[str, Any]) -> Weight:
    """Only what the guard noticed is coloured; a saved checkpoint is neither good nor bad."""
    if line.get("type") == "end" and line.get("error"):
        return "incident"
    by_type: dict[str, Weight] = {"fault": "incident", "note": "note", "rewind": "note"}
    return by_type.get(str(line.get("type")), "info")


def _error_at_the_end(notes: Sequence[Mapping[str, Any]]) -> str:
    """The exception that ended the last attempt, in words."""
    ends = [line for line in notes if line.get("type") == "end"]
    return str(ends[-1].get("error") or "") if ends else ""


def _ending(
    steps: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], *, ended_by: str = ""
) -> Iterator[Event]:
    """What came after the last incident, or that nothing went wrong."""
    if not steps:
        return
    end = max(line["step"] for line in steps)
    last_bad = max((incident.step for incident in incidents), default=None)
    after = [
        line
        for line in steps
        if line.get("committed", True) and (last_bad is None or line["step"] > last_bad)
    ]
    if last_bad is None:
        how = "no incident" if not ended_by else "then an exception outside of a step ended the run"
        weight: Weight = "incident" if ended_by else "good"
        yield Event(
            step=end, text=f"{phrases.count(len(after), 'step')} committed, {how}", weight=weight
        )
    elif after:
        loss = (
            f", the last with loss {phrases.number(after[-1]['loss'])}"
            if "loss" in after[-1]
            else ""
        )
        text = f"{phrases.count(len(after), 'step')} committed since the last incident{loss}"
        yield Event(step=after[0]["step"], last_step=end, text=text, weight="good")
    else:
        yield Event(
            step=end, text="no step was committed after the last incident", weight="incident"
        )

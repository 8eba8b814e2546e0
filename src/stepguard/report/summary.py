"""Summarize a run in one plain record: counts, kinds of incidents, what led to them, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from stepguard.records import Finding, GuardConfig
from stepguard.records.codec import dumps, to_jsonable
from stepguard.records.incident import Action, place, place_and_phase
from stepguard.report import phrases
from stepguard.report.panel import next_commands
from stepguard.report.phrases import done, done_times
from stepguard.report.story import Branch, Ending, Note, Run, Story, StoryIncident

# --- The run as a chain of events: what led to what, from the first warning to how it ended.


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


# --- Summarize a run in one plain record: counts, kinds of incidents, what led to them, events.


GRAVITY: tuple[Ending, ...] = ("closed", "running", "signal", "killed", "error", "stopped")
"""Endings, the worst last."""
LEAD_UP = 32
"""Steps shown before the first incident."""
MOST_ANSWERS = 3
"""Different parts that were left out, each named; more are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentGroup:
    """Incidents that are the same trouble again."""

    verdict: str
    summary: str
    first_step: int
    last_step: int
    count: int
    consecutive: int
    """The longest stretch of this kind without a step in between."""
    optimizer: str = ""
    """Whose incidents they are, in a run with several optimizers."""
    where: str = ""
    culprits: str = ""
    code: str = ""
    title: str = ""
    certainty: str = ""
    evidence: tuple[str, ...] = ()
    actions: dict[Action, int] = field(default_factory=dict)
    done: str = ""
    """What was done about them, in words."""
    lr: tuple[float, ...] = ()
    """Learning rate of each parameter group at the first of them."""
    schedule: str = ""
    """Name and position of the schedule at the first of them."""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipActivity:
    """How often clipping was at work, and how hard."""

    steps: int
    clipped: int
    mean_factor: float | None = None
    """Mean over the clipped steps of what the gradients were multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What `stepguard report` shows."""

    journal: str
    name: str
    """What the user calls the optimizer."""
    state: Ending
    """How the run ended, if it has; of several optimizers, the worst."""
    incidents: int
    optimizers: tuple[RunSummary, ...] = ()
    """One for each optimizer where the run has several: counts above are sums over them."""
    header: dict[str, Any]
    changed_settings: dict[str, Any]
    """Settings of the guard that are not the default."""
    run: int
    """Which run of its folder it is, from 1."""
    runs: int
    """How many there are."""
    elsewhere: tuple[str, ...]
    """Folders below with journals of other runs."""
    restarts: int
    """How often the run was started again."""
    rewinds: int
    left: int
    """Committed steps that no longer count: a rewind or a restart went back below them."""
    steps: int
    committed: int
    skipped: int
    calibrations: int
    """Steps that GradScaler dropped while it searched its scale; normal, so not skipped ones."""
    bad_steps: int
    first_bad: int | None
    last_bad: int | None
    longest_stretch: int
    first_loss: float | None
    best_loss: float | None
    last_loss: float | None
    seconds_per_step: float | None
    groups: tuple[IncidentGroup, ...]
    norms_before: tuple[float, ...]
    """Gradient norms of the committed steps just before the first incident."""
    losses_before: tuple[float, ...]
    followed_before: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What the user followed in the same steps, by name."""
    clip: ClipActivity | None
    timeline: tuple[Event, ...]
    torn: int


SUMMED = (
    *("incidents", "rewinds", "left", "steps", "committed", "skipped", "calibrations"),
    *("bad_steps", "torn"),
)
"""Counts of a run with several optimizers."""


def summarize(run: Run, story: Story | None = None) -> RunSummary:
    """Summarize a run, and name what else is in its folder. Pure."""
    if not run.further:
        return _summarize_lane(run, story)
    lanes = tuple(_summarize_lane(lane, story) for lane in run.lanes)
    groups = []
    for lane in lanes:
        groups += [replace(group, optimizer=lane.name) for group in lane.groups]
    counts: dict[str, Any] = {name: sum(getattr(lane, name) for lane in lanes) for name in SUMMED}
    first = [lane.first_bad for lane in lanes if lane.first_bad is not None]
    last = [lane.last_bad for lane in lanes if lane.last_bad is not None]
    return replace(
        lanes[0],
        state=worst_ending(run),
        optimizers=lanes,
        groups=tuple(groups),
        first_bad=min(first, default=None),
        last_bad=max(last, default=None),
        longest_stretch=max(lane.longest_stretch for lane in lanes),
        **counts,
    )


def worst_ending(run: Run) -> Ending:
    """How the run ended: what its policy or an exception did to one optimizer, it did to all."""
    endings = [lane.attempts[-1].ending if lane.attempts else "running" for lane in run.lanes]
    return max(endings, key=GRAVITY.index)


def _summarize_lane(run: Run, story: Story | None) -> RunSummary:
    table = run.steps
    losses = table.values("loss", table.counts)
    seconds = table.values("seconds")
    bad_rows = np.flatnonzero(table.dropped | (table.incident >= 0))
    header = {key: value for key, value in run.header.items() if key not in ("v", "type")}
    return RunSummary(
        journal=str(run.path),
        name=run.name,
        state=worst_ending(run),
        incidents=len(run.incidents),
        header=header,
        changed_settings=changed_settings(run.header),
        **_place_in_folder(run, story),
        restarts=max(len(run.attempts) - 1, 0),
        rewinds=sum(left.by == "rewind" for left in run.goings_back),
        left=int((table.committed & ~table.kept).sum()),
        steps=len(table),
        committed=int(table.committed.sum()),
        skipped=int(table.dropped.sum()),
        calibrations=int(table.calibration.sum()),
        **_bad_steps(run, bad_rows),
        first_loss=_at(losses, 0),
        best_loss=_at(np.sort(losses), 0),
        last_loss=_at(losses, -1),
        seconds_per_step=_at(np.sort(seconds), len(seconds) // 2),
        groups=group_incidents(run),
        clip=_clip_activity(run),
        timeline=timeline(run),
        torn=run.torn,
        **_before(run, bad_rows),
    )


def _place_in_folder(run: Run, story: Story | None) -> dict[str, Any]:
    if story is None:
        return {"run": run.number, "runs": 1, "elsewhere": ()}
    elsewhere = tuple(map(str, story.elsewhere))
    return {"run": run.number, "runs": len(story.runs), "elsewhere": elsewhere}


def _bad_steps(run: Run, bad_rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """First and last in the order of time, and how many came in a row."""
    without_row = [one.incident.step for one in run.incidents if one.row is None]
    steps = run.steps.step[bad_rows].tolist() or without_row
    return {
        "bad_steps": len(bad_rows) + len(without_row),
        "first_bad": steps[0] if steps else None,
        "last_bad": steps[-1] if steps else None,
        "longest_stretch": longest_stretch(bad_rows.tolist()) or min(len(without_row), 1),
    }


def _at(values: Sequence[float] | np.ndarray[Any, Any], place: int) -> float | None:
    return float(values[place]) if len(values) else None


def _before(run: Run, bad_rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What the committed steps just before the first bad one looked like."""
    table = run.steps
    chosen = np.zeros(len(table), np.bool_)
    if len(bad_rows):
        good = np.flatnonzero(table.committed[: bad_rows[0]])[-LEAD_UP:]
        chosen[good] = True
    followed = {}
    for name, series in table.series.items():
        values = series.where(chosen).values
        if name.startswith("followed/") and len(values):
            followed[name.removeprefix("followed/")] = tuple(map(float, values))
    return {
        "norms_before": tuple(map(float, table.column("grad_norm").where(chosen).values)),
        "losses_before": tuple(map(float, table.column("loss").where(chosen).values)),
        "followed_before": followed,
    }


def render_json(summary: RunSummary) -> str:
    """One line of strict JSON; non-finite numbers are null beside a `_kind`."""
    return dumps(to_jsonable(summary))


def longest_stretch(rows: Sequence[int]) -> int:
    """The most in a row; `rows` is sorted and without repeats."""
    longest = 0
    current = 0
    previous = None
    for row in rows:
        if previous is not None and row == previous + 1:
            current += 1
        else:
            current = 1
        longest = max(longest, current)
        previous = row
    return longest


def group_incidents(run: Run) -> tuple[IncidentGroup, ...]:
    """By kind, in the order of time."""
    kinds: dict[tuple[str, ...], list[StoryIncident]] = {}
    for one in run.incidents:
        kinds.setdefault(phrases.kind_of(one.incident), []).append(one)
    folder = run.path.parent
    return tuple(_group(members, str(folder)) for members in kinds.values())


def _group(members: list[StoryIncident], folder: str) -> IncidentGroup:
    first = members[0].incident
    decisions = [one.incident.decision for one in members if one.incident.decision]
    actions = Counter(decision.action for decision in decisions)
    # The folder may have been moved, or is called by another path than in training.
    here = replace(first, run=folder) if first.run else first
    group = IncidentGroup(
        verdict=first.verdict.kind,
        summary=first.verdict.summary,
        first_step=first.step,
        last_step=members[-1].incident.step,
        count=len(members),
        consecutive=_in_a_row(members),
        actions=dict(actions),
        done=_answers(members, actions),
        lr=first.reading.lr,
        schedule=first.reading.schedule,
        commands=tuple(next_commands(here)),
    )
    if first.origin is not None:
        where = place_and_phase(first.origin)
        group = replace(group, where=where, culprits=phrases.culprits_of(first))
    if first.findings:
        group = _with_cause(group, first.findings[0])
    return group


def _in_a_row(members: Sequence[StoryIncident]) -> int:
    rows = sorted(one.row for one in members if one.row is not None)
    if rows:
        return longest_stretch(rows)
    return longest_stretch(sorted({one.incident.step for one in members}))


def _answers(members: Sequence[StoryIncident], actions: Mapping[Action, int]) -> str:
    """What was done, with the part that was left out where there are few of them."""
    named: Counter[str] = Counter()
    for one in members:
        if one.incident.decision is not None:
            named[done(one.incident.decision)] += 1
    if len(named) > MOST_ANSWERS:
        return done_times(actions)
    return ", ".join(f"{words} ({times})" for words, times in named.items())


def _with_cause(group: IncidentGroup, finding: Finding) -> IncidentGroup:
    return replace(
        group,
        code=finding.code,
        title=finding.title,
        certainty=finding.certainty,
        evidence=finding.evidence,
    )


def changed_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    """The guard's settings in the header that differ from the defaults, with dotted names."""
    settings = header.get("settings") or header.get("config") or {}
    if not isinstance(settings, Mapping):
        return {}
    usual = dict(_flat(asdict(GuardConfig())))
    changed = {}
    for name, value in _flat(settings):
        if name not in usual or usual[name] != value:
            changed[name] = value
    return changed


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            # JSON has no tuples: the defaults must compare equal to what was read back.
            yield f"{prefix}{name}", list(value)
        else:
            yield f"{prefix}{name}", value


def _clip_activity(run: Run) -> ClipActivity | None:
    factors = run.steps.values("clip_factor")
    if not len(factors):
        return None
    clipped = factors[factors < 1.0]
    mean = float(clipped.mean()) if len(clipped) else None
    return ClipActivity(steps=len(factors), clipped=len(clipped), mean_factor=mean)

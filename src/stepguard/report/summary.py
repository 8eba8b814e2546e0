"""Summarize a run, or two side by side, as plain records that every output is made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any, Literal

import numpy as np

from stepguard.records import GuardConfig
from stepguard.records.codec import record
from stepguard.records.incident import Action, Incident, place, place_and_phase
from stepguard.report import phrases
from stepguard.report.phrases import count, done, number
from stepguard.report.story import Ending, Note, Run, Story, StoryIncident

# --- The run as a chain of events: what led to what, from the first warning to how it ended.


Weight = Literal["info", "note", "incident", "good"]
LATEST = 10**15
"""Sorts an event behind everything that was written by then."""

Placed = tuple[int, int, "Event"]
"""Rows before it, order among the lines, event."""


@record
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
    placed = [*_incidents(run), *_restarts(run), *_notes(run)]
    if len(run.steps):
        placed += [*_beginning(run), *_ending(run)]
    placed.sort(key=lambda event: event[:2])
    return tuple(event for _, _, event in placed)


def _beginning(run: Run) -> Iterator[Placed]:
    """The start, and the gradient norm leaving its usual level just before the first incident."""
    table = run.steps
    loss = table.column("loss")
    text = "the run began"
    if run.began is not None:
        text += f" at {phrases.moment(run.began)}"
    if len(loss) and loss.rows[0] == 0:
        text += f", loss {number(float(loss.values[0]))}"
    yield -1, 0, Event(step=int(table.step[0]), text=text)
    end = 0
    if run.incidents:
        end = run.incidents[0].rows_before
    window = np.zeros(len(table), np.bool_)
    window[max(end - 50, 0) : end] = True
    series = table.column("grad_norm").where(window)
    rows, norms = series.rows[series.finite], series.values[series.finite]
    if len(norms) < 8:
        return
    # The first half of the window stands for the level before anything went wrong.
    usual = float(np.median(norms[: len(norms) // 2]))
    onset = len(norms)
    # Times above its usual level that make a gradient norm part of the story
    while onset > 0 and norms[onset - 1] > 4.0 * usual > 0:
        onset -= 1
    if onset < len(norms):
        peak = number(float(norms[onset:].max()))
        first, last = map(int, table.step[rows[[onset, -1]]])
        text = f"the gradient norm rose from its usual {number(usual)} to {peak}"
        yield int(rows[onset]), 0, Event(step=first, last_step=last, text=text, weight="note")


def _incidents(run: Run) -> Iterator[Placed]:
    """Incidents in a row that are of one kind and were answered alike are one event."""
    stretches: list[list[StoryIncident]] = []
    for one in run.incidents:
        if stretches and _goes_on(stretches[-1][-1], one):
            stretches[-1].append(one)
        else:
            stretches.append([one])
    seen = set()
    for members in stretches:
        first, last = members[0].incident, members[-1].incident
        parts = [first.verdict.summary or phrases.verdict_title(first.verdict.kind)]
        kind = phrases.kind_of(first)
        if kind not in seen and first.origin is not None:
            where = phrases.joined([place(first.origin), phrases.culprits_of(first)])
            parts.append(f"originated in {first.origin.phase}: {where}".removesuffix(": "))
        if kind not in seen and first.findings:
            parts.append(f"{first.findings[0].code} {first.findings[0].title}")
        seen.add(kind)
        answer = ""
        if first.decision is not None and last.decision is not None:
            answer = done(first.decision)
            if len(members) > 1:
                answer += f" {len(members)} times"
            if last.decision.reason:
                answer += f" ({last.decision.reason})"
        text = phrases.joined([*parts, answer], "; ")
        event = Event(step=first.step, last_step=last.step, text=text, weight="incident")
        yield members[0].at, members[0].order, event


def _goes_on(before: StoryIncident, now: StoryIncident) -> bool:
    adjacent = 0 <= now.incident.step - before.incident.step <= 1
    if before.row is not None and now.row is not None:
        adjacent = now.row - before.row == 1
    answers = []
    for one in (before, now):
        decision = one.incident.decision
        words = done(decision) if decision is not None else ""
        answers.append((phrases.kind_of(one.incident), words, one.attempt))
    return adjacent and answers[0] == answers[1] and before.done != "rewound"


def _restarts(run: Run) -> Iterator[Placed]:
    """Restarts, and rewinds that no incident asked for."""
    table = run.steps
    for branch in run.branches:
        left = branch.left
        if left is None or left.incident is not None:
            continue
        text = f"went back to step {left.to}"
        if left.by == "restart":
            text = f"started again at step {left.to}"
            if run.attempts[branch.attempt].ending == "killed":
                text += ", after a process that left no end record"
        elif left.by != "repeat" and left.text:
            text = left.text
        lost = int((table.committed[branch.rows] & (table.step[branch.rows] >= left.to)).sum())
        if lost:
            text += f"; {count(lost, 'earlier step')} no longer counted"
        order = LATEST - (left.by != "restart")
        yield branch.end_row, order, Event(step=left.to, text=text, weight="note")


def _notes(run: Run) -> Iterator[Placed]:
    """Notes of one kind are one event; everything else in the journal is an event of its own."""
    kinds: dict[str, list[Note]] = {}
    for position, note in enumerate(run.notes):
        # Rewinds and restarts are events as such; sealed checkpoints are what should happen.
        if note.type in ("rewind", "checkpoint") or note.kind == "restored":
            continue
        name = f"{note.attempt} {note.kind}" if note.type == "note" else f"line {position}"
        kinds.setdefault(name, []).append(note)
    for notes in kinds.values():
        first = notes[0]
        text, weight = _worded(first)
        if len(notes) > 1:
            text += f" ({len(notes)} times)"
        steps = []
        for note in (first, notes[-1]):
            step = note.step
            # Lines on the whole run (its end) carry no step.
            if step is None and 0 < note.at <= len(run.steps):
                step = int(run.steps.step[note.at - 1])
            steps.append(step or 0)
        event = Event(step=steps[0], last_step=steps[1], text=text, weight=weight)
        order = first.order
        if first.type == "end":
            # The last word of an attempt, whatever the threads of it still wrote.
            order = LATEST - 2
        yield first.at, order, event


def _worded(note: Note) -> tuple[str, Weight]:
    """Only what the guard noticed is coloured; a saved checkpoint is neither good nor bad."""
    if note.type == "note":
        return note.text or phrases.verdict_title(note.kind or "note"), "note"
    if note.type == "fault":
        return f"the guard failed and was disarmed: {note.text}".rstrip(": "), "incident"
    if note.type == "no_look":
        return f"no health probe: {note.text}", "info"
    if note.type == "no_audit":
        return f"no audit: {note.text}", "info"
    if note.type != "end":
        return f"{note.type}: {note.text}".rstrip(": "), "info"
    if note.fields.get("error"):
        return f"the run was ended by an exception: {note.fields['error']}", "incident"
    if note.fields.get("signal"):
        return f"the run was ended by {note.fields['signal']}", "info"
    if note.fields.get("armed", True):
        return "the guard was closed", "info"
    return "the disarmed guard was closed", "info"


def _ending(run: Run) -> Iterator[Placed]:
    """What came after the last incident, or that nothing went wrong."""
    table = run.steps
    attempt = run.attempts[-1]
    end = int(table.step[-1])
    since = 0
    if run.incidents:
        last = run.incidents[-1]
        since = last.rows_before + (last.row is not None)
    after = np.flatnonzero(table.committed[since:]) + since
    made = f"{count(len(after), 'step')} committed"
    if not run.incidents and attempt.error:
        text = f"{made}, then an exception outside of a step ended the run"
        yield len(table), LATEST - 3, Event(step=end, text=text, weight="incident")
    elif not run.incidents:
        yield len(table), LATEST - 3, Event(step=end, text=f"{made}, no incident", weight="good")
    elif len(after):
        text = f"{made} since the last incident"
        loss = table.last("loss")
        if loss is not None:
            text += f", the last with loss {number(loss)}"
        event = Event(step=int(table.step[after[0]]), last_step=end, text=text, weight="good")
        yield int(after[0]), LATEST - 4, event
    else:
        text = "no step was committed after the last incident"
        yield len(table), LATEST - 3, Event(step=end, text=text, weight="incident")
    if attempt.ending == "killed":
        text = "the process is gone, and left no end record"
        yield len(table), LATEST, Event(step=end, text=text, weight="incident")


# --- One plain record of a run: counts, kinds of incidents, what led to them, events.


GRAVITY: tuple[Ending, ...] = ("closed", "running", "signal", "killed", "error", "stopped")
"""Endings, the worst last."""


@record
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
    code: str = ""
    title: str = ""
    actions: dict[Action, int] = field(default_factory=dict)
    done: str = ""
    """What was done about them, in words."""
    incident: Incident
    """The first of them, whole."""
    commands: tuple[str, ...] = ()
    """What to run next."""


@record
class ClipActivity:
    """How often clipping was at work, and how hard."""

    steps: int
    clipped: int
    mean_factor: float | None = None
    """Mean over the clipped steps of what the gradients were multiplied by."""


@record
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
    went_back: int
    """Rewinds, restarts and repetitions."""
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

    @property
    def lanes(self) -> tuple[RunSummary, ...]:
        """One for each optimizer."""
        return self.optimizers or (self,)


SUMMED = (
    *("incidents", "rewinds", "left", "steps", "committed", "skipped", "calibrations"),
    *("bad_steps", "torn"),
)
"""Counts of a run with several optimizers."""


def summarize(run: Run, story: Story | None = None) -> RunSummary:
    """Summarize a run, and name what else is in its folder. Pure."""
    lanes = tuple(_summarize_lane(lane, story) for lane in run.lanes)
    if not run.further:
        return lanes[0]
    groups = []
    for lane in lanes:
        groups += [replace(group, optimizer=lane.name) for group in lane.groups]
    counts = {name: sum(getattr(lane, name) for lane in lanes) for name in SUMMED}
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
    factors = table.values("clip_factor")
    clip = None
    if len(factors):
        clipped = factors[factors < 1.0]
        clip = ClipActivity(steps=len(factors), clipped=len(clipped))
        if len(clipped):
            clip = replace(clip, mean_factor=float(clipped.mean()))
    # First and last in the order of time.
    bad_rows = np.flatnonzero(table.dropped | (table.incident >= 0))
    without_row = [one.incident.step for one in run.incidents if one.row is None]
    bad = table.step[bad_rows].tolist() or without_row
    # The committed steps just before the first bad one.
    before = np.zeros(len(table), np.bool_)
    if len(bad_rows):
        # The last steps before the first incident
        before[np.flatnonzero(table.committed[: bad_rows[0]])[-32:]] = True
    led_up = {}
    for name, series in table.series.items():
        led_up[name.removeprefix("followed/")] = tuple(series.where(before).values.tolist())
    followed = [name.removeprefix("followed/") for name in table.series if "followed/" in name]
    runs = 1
    elsewhere: tuple[str, ...] = ()
    if story is not None:
        runs, elsewhere = len(story.runs), tuple(map(str, story.elsewhere))
    return RunSummary(
        journal=str(run.path),
        name=run.name,
        state=worst_ending(run),
        incidents=len(run.incidents),
        header=dict(run.header),
        changed_settings=changed_settings(run.header),
        run=run.number,
        runs=runs,
        elsewhere=elsewhere,
        restarts=max(len(run.attempts) - 1, 0),
        rewinds=sum(left.by == "rewind" for left in run.goings_back),
        went_back=len(run.goings_back),
        left=int((table.committed & ~table.kept).sum()),
        steps=len(table),
        committed=int(table.committed.sum()),
        skipped=int(table.dropped.sum()),
        calibrations=int(table.calibration.sum()),
        bad_steps=len(bad_rows) + len(without_row),
        first_bad=next(iter(bad), None),
        last_bad=next(reversed(bad), None),
        longest_stretch=longest_stretch(bad_rows.tolist()) or min(len(without_row), 1),
        first_loss=_at(losses, 0),
        best_loss=_at(np.sort(losses), 0),
        last_loss=_at(losses, -1),
        seconds_per_step=_at(np.sort(seconds), len(seconds) // 2),
        groups=group_incidents(run),
        norms_before=led_up.get("grad_norm", ()),
        losses_before=led_up.get("loss", ()),
        followed_before={name: led_up[name] for name in followed if led_up[name]},
        clip=clip,
        timeline=timeline(run),
        torn=run.torn,
    )


def _at(values: np.ndarray[Any, Any], place: int) -> float | None:
    return float(values[place]) if len(values) else None


def stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Steps in their order as runs without a gap: first and last of each."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and 0 <= step - runs[-1][1] <= 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


def longest_stretch(rows: Sequence[int]) -> int:
    """The most in a row; `rows` is sorted."""
    return max((last - first + 1 for first, last in stretches(rows)), default=0)


def group_incidents(run: Run) -> tuple[IncidentGroup, ...]:
    """By kind, in the order of time."""
    kinds: dict[tuple[str, ...], list[StoryIncident]] = {}
    for one in run.incidents:
        kinds.setdefault(phrases.kind_of(one.incident), []).append(one)
    return tuple(_group(members, str(run.path.parent)) for members in kinds.values())


def _group(members: Sequence[StoryIncident], folder: str) -> IncidentGroup:
    first = members[0].incident
    decisions = [one.incident.decision for one in members if one.incident.decision]
    actions = Counter(decision.action for decision in decisions)
    answers = Counter(done(decision) for decision in decisions)
    words = ", ".join(f"{answer} ({times})" for answer, times in answers.items())
    # Different parts that were left out, each named; more are only counted
    if len(answers) > 3:
        words = phrases.done_times(actions)
    rows = [one.row for one in members if one.row is not None]
    # The folder may have been moved, or is called by another path than in training.
    here = replace(first, run=folder) if first.run else first
    group = IncidentGroup(
        verdict=first.verdict.kind,
        summary=first.verdict.summary,
        first_step=first.step,
        last_step=members[-1].incident.step,
        count=len(members),
        consecutive=longest_stretch(sorted(rows or (one.incident.step for one in members))),
        actions=dict(actions),
        done=words,
        incident=here,
        commands=tuple(phrases.next_commands(here)),
    )
    if first.origin is not None:
        group = replace(group, where=place_and_phase(first.origin))
    for cause in first.findings[:1]:
        group = replace(group, code=cause.code, title=cause.title)
    return group


def changed_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    """The guard's settings in the header that differ from the defaults, with dotted names."""
    settings = header.get("settings") or header.get("config") or {}
    usual = dict(flat(asdict(GuardConfig())))
    changed = {}
    for name, value in flat(settings):
        if name not in usual or usual[name] != value:
            changed[name] = value
    return changed


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values; a setting inside a setting has a dotted name."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            # JSON has no tuples: the defaults must compare equal to what was read back.
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


# --- Two runs side by side: what each did about bad steps, with the numbers of their journals.


@record
class Row:
    """One aspect of both runs in words."""

    aspect: str
    first: str
    second: str


@record
class RunComparison:
    """What `stepguard compare` shows."""

    first: str
    second: str
    rows: tuple[Row, ...]
    settings: dict[str, tuple[Any, Any]]
    """Settings of the guard that differ: name -> value in the first run, value in the second."""

    @property
    def cells(self) -> list[tuple[str, str, str]]:
        """Every row of the table: aspects, then settings."""
        rows = [(row.aspect, row.first, row.second) for row in self.rows]
        for name, pair in self.settings.items():
            before, after = ("default" if value is None else str(value) for value in pair)
            rows.append((name, before, after))
        return rows


def compare(first: Run, second: Run) -> RunComparison:
    """Compare two runs. Pure: the same two stories give the same table."""
    ours, theirs = summarize(first), summarize(second)
    of_second = _aspects(second, theirs)
    rows = []
    for aspect, words in _aspects(first, ours).items():
        rows.append(Row(aspect=aspect, first=words, second=of_second[aspect]))
    settings = {}
    for name in {**ours.changed_settings, **theirs.changed_settings}:
        pair = (ours.changed_settings.get(name), theirs.changed_settings.get(name))
        if name != "run_dir" and pair[0] != pair[1]:
            settings[name] = pair
    return RunComparison(
        first=ours.journal, second=theirs.journal, rows=tuple(rows), settings=settings
    )


def _aspects(run: Run, summary: RunSummary) -> dict[str, str]:
    """Each aspect of a run in words."""
    table = run.steps
    not_finite = np.zeros(len(table), np.bool_)
    for name in ("loss", "grad_norm"):
        series = table.column(name)
        not_finite[series.rows[~series.finite]] = True
    harmful = not_finite & table.committed
    bad = summary.bad_steps + int((harmful & (table.incident < 0)).sum())
    steps = f"{summary.committed:,} of {summary.steps:,} committed"
    if summary.left:
        steps += f", {summary.left:,} of them no longer counted"
    bad_words = f"{bad:,}"
    if summary.first_bad is not None:
        bad_words += f", first at step {summary.first_bad}"
    # An unguarded loop says `guarded: false` in its journal.
    judged = 0
    if run.header.get("guarded", True):
        judged = len(table.column("loss"))
    counts: Counter[Action] = Counter()
    for group in summary.groups:
        counts.update(group.actions)
    cause = clipping = "-"
    for worst in summary.groups[:1]:
        cause = phrases.joined([worst.where, f"{worst.code} {worst.title}".strip()])
    if summary.clip is not None:
        clipping = f"{summary.clip.clipped / summary.clip.steps:.0%} of the steps"
    losses = table.values("loss", table.counts)
    # Share of the committed steps whose loss stands for where a run ended
    last = losses[-max(1, int(len(losses) * 0.1)) :]
    ended_at = None
    if len(last):
        ended_at = float(last.mean())
    return {
        "steps": steps,
        "losses judged before the update": f"{judged:,}",
        "bad steps": bad_words,
        "bad steps committed": f"{int(harmful.sum()):,}",
        "what was done": phrases.done_times(counts) or "-",
        "first origin and cause": cause or "not located",
        "clipping": clipping,
        "loss at the end": number(ended_at),
        "best loss": number(summary.best_loss),
        "seconds a step": number(summary.seconds_per_step),
    }

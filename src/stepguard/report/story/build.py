"""Put the lines of all ranks together: runs, attempts, branches, and what was done to which row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stepguard.records import Incident
from stepguard.records.codec import from_jsonable
from stepguard.records.probes import Look
from stepguard.report.story.model import (
    EMPTY,
    Attempt,
    Bools,
    Branch,
    CheckpointEvent,
    CheckpointState,
    Done,
    Ending,
    Floats,
    Ints,
    Lane,
    Left,
    LeftBy,
    Note,
    Process,
    Run,
    Series,
    StepTable,
    Story,
    StoryIncident,
    ValuesOfRows,
    Written,
    grouped,
    matched,
    processes_of,
    words,
)

# --- The rows of one run in the order of time: stretches, goings back, and which rows still
# count.


ENDLESS = np.iinfo(np.int64).max
DONE: dict[str, Done] = {
    "leave_out": "partial",
    "skip": "dropped",
    "retry": "retried",
    "undo": "undone",
    "rewind": "rewound",
    "stop": "stopped",
}
"""What each action of a decision did; `note` depends on the row."""


@dataclass(frozen=True, slots=True)
class Back:
    """The run went back when `at` rows had been written."""

    at: int
    to: int
    by: LeftBy
    attempt: int
    """The attempt whose stretch it ended."""
    order: int
    text: str = ""


@dataclass(slots=True)
class RunRows:
    """One rank's part of a run, laid out in time."""

    processes: list[Process]
    numbers: list[int]
    """The attempt of the run that each process is."""
    spans: list[tuple[int, int]]
    """First and end row of each process."""
    branches: tuple[Branch, ...] = ()
    table: StepTable = EMPTY

    def placed(self, of: Callable[[Process], list[Written]]) -> Iterator[tuple[int, int, Written]]:
        """Lines with the process that wrote them and the rows of the run before them."""
        for position, process in enumerate(self.processes):
            first, end = self.spans[position]
            for line in of(process):
                at = min(max(first + line.at - process.first, first), end)
                yield position, at, line

    @property
    def notes(self) -> Iterator[tuple[int, int, Written]]:
        return self.placed(lambda process: process.notes)

    @property
    def incidents(self) -> Iterator[tuple[int, int, Written]]:
        return self.placed(lambda process: process.incidents)


def lay_out(lane: Lane, processes: Sequence[Process], numbers: Sequence[int]) -> RunRows:
    """Cut the rows of these processes out of their journal, and find where the run went back.

    `numbers` are the attempts of the run that the processes belong to.
    """
    spans = []
    parts = [np.zeros(0, np.int64)]
    total = 0
    for process in processes:
        length = process.end - process.first
        spans.append((total, total + length))
        parts.append(np.arange(process.first, process.end))
        total += length
    chosen = np.concatenate(parts)
    step = np.array(lane.step, np.int64)[chosen]
    committed = np.array(lane.committed, np.bool_)[chosen]
    attempt = np.zeros(total, np.int64)
    for number, (first, end) in zip(numbers, spans, strict=True):
        attempt[first:end] = number
    rows = RunRows(list(processes), list(numbers), spans)
    backs = _all_backs(step, committed, attempt, _told_backs(rows, step))
    rows.branches = _branches(backs, step, last_attempt=numbers[-1] if numbers else 0)
    rows.table = StepTable(
        rank=lane.rank,
        step=step,
        committed=committed,
        kept=_kept(step, backs),
        attempt=attempt,
        branch=_branch_of(total, rows.branches),
        incident=np.full(total, -1, np.int64),
        calibration=np.zeros(total, np.bool_),
        series=_series(lane, chosen),
    )
    return rows


# --- going back


def _told_backs(rows: RunRows, step: Ints) -> list[Back]:
    """What the journal says of rewinds and restarts, in time."""
    found = list(_restarts(rows, step))
    for position, at, line in rows.notes:
        noted = _noted_back(line, at, rows.numbers[position])
        # A checkpoint that was loaded before the first step is the restart itself.
        if noted is not None and line is not rows.processes[position].restored:
            found.append((position, noted))
    for position, at, line in rows.incidents:
        stopped = _back_at_the_stop(line, at, rows.numbers[position])
        if stopped is not None:
            found.append((position, stopped))
    found.sort(key=lambda pair: (pair[1].at, pair[0], pair[1].order))
    return [back for _, back in found]


def _restarts(rows: RunRows, step: Ints) -> Iterator[tuple[int, Back]]:
    for position, process in enumerate(rows.processes[1:], start=1):
        first, end = rows.spans[position]
        to = _restored_step(process.restored)
        if to is None and end > first:
            to = int(step[first])
        if to is not None:
            text = words(process.restored.fields) if process.restored else ""
            yield position, Back(first, to, "restart", rows.numbers[position - 1], -1, text)


def _back_at_the_stop(line: Written, at: int, attempt: int) -> Back | None:
    """A run that stops with damaged weights leaves the newest good ones in memory."""
    decision = line.incident.decision if line.incident else None
    if decision is None or decision.action != "stop" or decision.rewound_to is None:
        return None
    text = f"stopped with the weights after {decision.rewound_to} steps"
    return Back(at, decision.rewound_to, "rewind", attempt, line.order, text)


def _noted_back(line: Written, at: int, attempt: int) -> Back | None:
    """A rewind, or a checkpoint that was loaded in the middle of a run."""
    to = line.fields.get("to")
    if line.fields.get("type") == "rewind" and isinstance(to, int):
        return Back(at, to, "rewind", attempt, line.order, words(line.fields))
    to = _restored_step(line)
    if line.fields.get("kind") == "restored" and to is not None:
        return Back(at, to, "restore", attempt, line.order, words(line.fields))
    return None


def _restored_step(line: Written | None) -> int | None:
    step = line.fields.get("step") if line is not None else None
    return step if isinstance(step, int) else None


def _all_backs(step: Ints, committed: Bools, attempt: Ints, told: Sequence[Back]) -> list[Back]:
    """Add the places where a committed step comes again without a word."""
    backs: list[Back] = []
    waiting = list(reversed(told))
    next_new = 0  # the lowest step without an update on the present line
    for row, (number, made) in enumerate(zip(step.tolist(), committed.tolist(), strict=True)):
        while waiting and waiting[-1].at <= row:
            back = waiting.pop()
            next_new = min(next_new, back.to)
            backs.append(back)
        if number < next_new:
            backs.append(Back(row, number, "repeat", int(attempt[row]), 0))
            next_new = number
        if made:
            next_new = number + 1
    return backs + list(reversed(waiting))


def _kept(step: Ints, backs: Sequence[Back]) -> Bools:
    """A row counts unless the run later went back to its step or below."""
    lowest = np.full(len(step) + 1, ENDLESS, np.int64)
    for back in backs:
        lowest[back.at] = min(lowest[back.at], back.to)
    later = np.minimum.accumulate(lowest[::-1])[::-1]
    kept: Bools = step < later[1:]
    return kept


def _branches(backs: Sequence[Back], step: Ints, last_attempt: int) -> tuple[Branch, ...]:
    """Stretches between goings back."""
    branches = []
    first = 0
    for back in backs:
        rows = step[first : back.at]
        came_from = int(rows.max()) if len(rows) else back.to
        left = Left(by=back.by, to=back.to, came_from=came_from, text=back.text)
        branches.append(Branch(attempt=back.attempt, first_row=first, end_row=back.at, left=left))
        first = back.at
    branches.append(Branch(attempt=last_attempt, first_row=first, end_row=len(step)))
    return tuple(branches)


def _branch_of(total: int, branches: Sequence[Branch]) -> Ints:
    of = np.zeros(total, np.int64)
    for number, branch in enumerate(branches):
        of[branch.rows] = number
    return of


# --- columns


def _series(lane: Lane, chosen: Ints) -> dict[str, Series]:
    new_row = np.full(len(lane.step), -1, np.int64)
    new_row[chosen] = np.arange(len(chosen))
    series = {}
    for name, column in lane.series.items():
        cut = _cut(name, column, new_row)
        if len(cut):
            series[name] = cut
    clipped = _clipped(series)
    if clipped is not None:
        series[clipped.name] = clipped
    return series


def _cut(name: str, column: ValuesOfRows, new_row: Ints) -> Series:
    rows = new_row[np.array(column.rows, np.int64)]
    inside = rows >= 0
    rows = rows[inside]
    values = np.array(column.values, np.float64)[inside]
    if len(rows) > 1 and (np.diff(rows) < 0).any():
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        values = values[order]
    return Series(name, rows, values)


def _clipped(series: dict[str, Series]) -> Series | None:
    """The gradient norm after clipping, where something clips."""
    norm = series.get("grad_norm")
    factor = series.get("clip_factor")
    if norm is None or factor is None:
        return None
    rows, at_norm, at_factor = np.intersect1d(
        norm.rows, factor.rows, assume_unique=True, return_indices=True
    )
    factors: Floats = np.minimum(factor.values[at_factor], 1.0)
    with np.errstate(invalid="ignore"):
        values = norm.values[at_norm] * factors
    return Series("grad_norm_clipped", rows.astype(np.int64), values)


# --- incidents and the rows they belong to


def link_incidents(rows: RunRows) -> list[StoryIncident]:
    """Every incident with the row of its step, and what was really done."""
    table = rows.table
    taken: set[int] = set()
    found = []
    for position, at, line in rows.incidents:
        incident = line.incident
        assert incident is not None
        row = _row_of(table, rows.spans[position], at, incident, taken)
        if row is not None:
            taken.add(row)
        found.append(
            StoryIncident(
                incident=incident,
                done=_done(incident, None if row is None else bool(table.committed[row])),
                attempt=rows.numbers[position],
                row=row,
                at=at,
                order=line.order,
                kept=True if row is None else bool(table.kept[row]),
                ranks=(table.rank,),
            )
        )
    return found


def _row_of(
    table: StepTable, span: tuple[int, int], at: int, incident: Incident, taken: set[int]
) -> int | None:
    """The line of the step is written just before its incident, or just after a mere note."""
    raised = incident.verdict.kind == "exception"
    for row in (at - 1, at):
        if not span[0] <= row < span[1] or row in taken:
            continue
        if table.step[row] != incident.step:
            continue
        # A step that raised and was tried again has the same number.
        if raised and table.committed[row]:
            continue
        return row
    return None


def _done(incident: Incident, committed: bool | None) -> Done:
    action = incident.decision.action if incident.decision is not None else "note"
    if incident.verdict.kind == "exception" and action == "stop":
        return "raised"
    if action != "note":
        return DONE[action]
    if committed is None:
        return "told"
    return "let_through" if committed else "dropped"


def with_incidents(
    table: StepTable, told: Sequence[StoryIncident], incidents: Sequence[StoryIncident]
) -> StepTable:
    """The table with the incident of each row, and which rows a GradScaler dropped.

    `told` is what this rank recorded, with its own rows; `incidents` those of the run.
    """
    places = {(one.attempt, one.incident.id): place for place, one in enumerate(incidents)}
    of = np.full(len(table), -1, np.int64)
    for one in told:
        if one.row is not None:
            of[one.row] = places[one.attempt, one.incident.id]
    scaled = np.zeros(len(table), np.bool_)
    scaled[table.column("scale").rows] = True
    calibration: Bools = ~table.committed & scaled & (of < 0)
    return replace(table, incident=of, calibration=calibration)


# --- Put the lines of all ranks together: runs, attempts, branches, and what was done to which
# row.


LOOK = "look"
"""The type of journal lines that hold a deep look."""
FOREIGN = 10**12
"""Added to the order of what other ranks wrote: it comes after what this rank wrote by then."""


def build_story(
    path: Path,
    lanes: Mapping[int, Lane],
    main: int,
    journal: Path,
    elsewhere: tuple[Path, ...],
    alive: bool | None = None,
) -> Story:
    """The story of one folder. Pure: the same lines give the same story.

    `alive`: does the process that started last still exist?
    """
    torn = sum(lane.torn for lane in lanes.values())
    lane = lanes.get(main) or Lane(journal, main)
    processes = processes_of(lane)
    others: list[tuple[Lane, dict[int, list[Process]]]] = []
    for rank, other in lanes.items():
        if rank != main:
            others.append((other, matched(processes_of(other), processes, rank)))
    runs = []
    for number, (name, members) in enumerate(grouped(lane, processes), start=1):
        own = _of_run(lane, {place: [processes[place]] for place in members}, members)
        theirs = [_of_run(other, by_place, members) for other, by_place in others]
        attempts = _attempts(own, members, len(processes), alive)
        runs.append(_run(name, number, lane, attempts, own, theirs, torn))
    if not runs:
        runs.append(_run("", 1, lane, (), lay_out(lane, [], []), [], torn))
    return Story(path=path, runs=tuple(runs), torn=torn, elsewhere=elsewhere)


def _of_run(
    lane: Lane, by_place: Mapping[int, Sequence[Process]], members: Sequence[int]
) -> RunRows:
    """The rows of one rank that belong to a run, given the places of its processes."""
    own = []
    numbers = []
    for number, place in enumerate(members):
        for process in by_place.get(place, ()):
            own.append(process)
            numbers.append(number)
    return lay_out(lane, own, numbers)


def _run(
    name: str,
    number: int,
    lane: Lane,
    attempts: tuple[Attempt, ...],
    own: RunRows,
    theirs: Sequence[RunRows],
    torn: int,
) -> Run:
    told = {rows.table.rank: link_incidents(rows) for rows in (own, *theirs)}
    incidents = told[lane.rank]
    notes = _notes(own)
    for rows in theirs:
        incidents = _joined(incidents, told[rows.table.rank], own.table)
        faults = [note for note in _notes(rows) if note.type == "fault"]
        notes += [_moved(note, own.table) for note in faults]
    incidents = sorted(incidents, key=lambda one: (one.at, one.order))
    notes.sort(key=lambda note: (note.at, note.order))
    looks = _looks(notes)
    notes = [note for note in notes if note.type != LOOK]
    by_rank: dict[int, StepTable] = {}
    for rows in (own, *theirs):
        by_rank[rows.table.rank] = with_incidents(rows.table, told[rows.table.rank], incidents)
    return Run(
        id=name,
        number=number,
        path=lane.path,
        attempts=attempts,
        branches=_with_incident(own.branches, incidents),
        steps=by_rank[lane.rank],
        by_rank=dict(sorted(by_rank.items())),
        incidents=tuple(incidents),
        notes=tuple(notes),
        checkpoints=tuple(_checkpoints(notes)),
        looks=looks,
        torn=torn,
    )


def _attempts(
    rows: RunRows, members: Sequence[int], starts: int, alive: bool | None
) -> tuple[Attempt, ...]:
    attempts = []
    for position, process in enumerate(rows.processes):
        first, end = rows.spans[position]
        last_start = members[position] == starts - 1
        ending, error = _ending(process, running=last_start and alive is not False)
        restored = process.restored.fields if process.restored else {}
        step = restored.get("step")
        attempts.append(
            Attempt(
                start=members[position] + 1,
                header=process.header,
                first_row=first,
                end_row=end,
                ending=ending,
                restored=step if isinstance(step, int) else None,
                checkpoint=str(restored.get("checkpoint") or ""),
                error=error,
                signal=_signal(process),
                alive=alive if last_start else None,
            )
        )
    return tuple(attempts)


def _signal(process: Process) -> str:
    ends = [line.fields for line in process.notes if line.fields["type"] == "end"]
    return str(ends[-1].get("signal") or "") if ends else ""


def _ending(process: Process, *, running: bool) -> tuple[Ending, str]:
    ends = [line.fields for line in process.notes if line.fields["type"] == "end"]
    last = ends[-1] if ends else {}
    error = str(last.get("error") or "")
    if _stopped_last(process):
        return "stopped", error
    if error:
        return "error", error
    if last.get("signal"):
        return "signal", ""
    if ends:
        return "closed", ""
    return ("running" if running else "killed"), ""


def _stopped_last(process: Process) -> bool:
    """Did the policy stop it? One that catches TrainingHalted and goes on has rows after it."""
    if not process.incidents:
        return False
    last = process.incidents[-1]
    return last.incident is not None and last.incident.stopped and last.at >= process.end - 1


def _notes(rows: RunRows) -> list[Note]:
    notes = []
    for position, at, line in rows.notes:
        step = line.fields.get("step")
        notes.append(
            Note(
                type=str(line.fields.get("type", "")),
                kind=str(line.fields.get("kind", "")),
                text=words(line.fields),
                step=step if isinstance(step, int) else None,
                attempt=rows.numbers[position],
                at=at,
                order=line.order,
                fields=line.fields,
                rank=rows.table.rank,
            )
        )
    return notes


def _joined(
    incidents: list[StoryIncident], told: Sequence[StoryIncident], table: StepTable
) -> list[StoryIncident]:
    """Add what another rank recorded; what both did is one incident with both ranks."""
    joined = list(incidents)
    places = {(one.attempt, one.incident.id): place for place, one in enumerate(joined)}
    for theirs in told:
        place = places.get((theirs.attempt, theirs.incident.id))
        if place is not None:
            both = tuple(sorted({*joined[place].ranks, *theirs.ranks}))
            joined[place] = replace(joined[place], ranks=both)
            continue
        at = _row_after(table, theirs.attempt, theirs.incident.step)
        joined.append(replace(theirs, row=None, at=at, order=theirs.order + FOREIGN))
    return joined


def _moved(note: Note, table: StepTable) -> Note:
    """A note of another rank, at its place among the rows of this one."""
    at = _row_after(table, note.attempt, note.step if note.step is not None else 0)
    return replace(note, at=at, order=note.order + FOREIGN)


def _row_after(table: StepTable, attempt: int, step: int) -> int:
    before = np.flatnonzero((table.attempt == attempt) & (table.step <= step))
    return int(before[-1]) + 1 if len(before) else 0


def _with_incident(
    branches: Sequence[Branch], incidents: Sequence[StoryIncident]
) -> tuple[Branch, ...]:
    """Name the incident that asked for a rewind: it is written right after its line."""
    places: dict[tuple[int, int, int | None], int] = {}
    for place, one in enumerate(incidents):
        if one.incident.decision is not None:
            places[one.attempt, one.at, one.incident.decision.rewound_to] = place
    named = []
    for branch in branches:
        left = branch.left
        if left is not None and left.by == "rewind":
            left = replace(left, incident=places.get((branch.attempt, branch.end_row, left.to)))
        named.append(replace(branch, left=left))
    return tuple(named)


def _looks(notes: Sequence[Note]) -> tuple[Look, ...]:
    """Deep looks; one that does not fit its record is left out, as any torn line is."""
    found = []
    for note in notes:
        fields = note.fields.get("look")
        if note.type != LOOK or not isinstance(fields, dict):
            continue
        with suppress(ValueError):  # pydantic's ValidationError is one
            found.append(from_jsonable(Look, fields))
    return tuple(found)


def _checkpoints(notes: Sequence[Note]) -> list[CheckpointEvent]:
    found = []
    for note in notes:
        event = _checkpoint(note)
        if event is not None:
            found.append(event)
    return found


def _checkpoint(note: Note) -> CheckpointEvent | None:
    state: CheckpointState
    step = note.step
    if note.type == "checkpoint":
        state = "good" if note.fields.get("good", True) else "kept"
    elif note.type == "rewind":
        state = "rewound_to"
        step = note.fields.get("to")
    elif note.kind == "restored":
        state = "restored"
    else:
        state = "refused"
        step = note.fields.get("refused")
    if not isinstance(step, int):
        return None
    return CheckpointEvent(
        step=step,
        state=state,
        text=note.text,
        path=str(note.fields.get("path") or note.fields.get("checkpoint") or ""),
        attempt=note.attempt,
        at=note.at,
        order=note.order,
    )

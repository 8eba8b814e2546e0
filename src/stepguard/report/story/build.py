"""Put the lines of all ranks together: runs, attempts, branches, and what was done to which row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepguard.records.codec import from_jsonable
from stepguard.records.look import Look
from stepguard.report.story.lane import Lane, words
from stepguard.report.story.model import (
    Attempt,
    Branch,
    CheckpointEvent,
    CheckpointState,
    Ending,
    Note,
    Run,
    StepTable,
    Story,
    StoryIncident,
)
from stepguard.report.story.processes import Process, grouped, matched, processes_of
from stepguard.report.story.rows import RunRows, lay_out, link_incidents, with_incidents

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

"""The processes that wrote a journal: what each wrote, and which of them belong to one run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepguard.report.story.lane import Lane, Written


@dataclass(slots=True)
class Process:
    """One start in one journal: the rows and lines up to the next."""

    start: int
    """Position among the starts of its journal, from 0."""
    header: Mapping[str, Any]
    first: int
    end: int
    notes: list[Written] = field(default_factory=list)
    incidents: list[Written] = field(default_factory=list)
    restored: Written | None = None
    """The note of a checkpoint that was loaded before the first step."""
    run: str = ""
    first_step: int | None = None

    @property
    def time(self) -> float | None:
        value = self.header.get("time")
        return float(value) if isinstance(value, int | float) else None


def processes_of(lane: Lane) -> list[Process]:
    found = []
    for place, start in enumerate(lane.starts):
        last = place + 1 == len(lane.starts)
        end = len(lane.step) if last else lane.starts[place + 1].at
        process = Process(place, start.header, start.at, end)
        process.run = str(start.header.get("run") or "")
        if end > start.at:
            process.first_step = lane.step[start.at]
        found.append(process)
    for line in lane.notes:
        _give(found, lane, line)
    for line in lane.incidents:
        found[_place_of(lane, line)].incidents.append(line)
    return found


def _give(processes: list[Process], lane: Lane, line: Written) -> None:
    """A note belongs to the process that was the last to start, or to the one it names."""
    place = _place_of(lane, line)
    named = line.fields.get("attempt")
    if line.fields.get("type") == "end" and isinstance(named, int) and 0 < named <= place + 1:
        place = named - 1
    process = processes[place]
    process.notes.append(line)
    if line.fields.get("kind") == "restored" and line.at == process.first:
        process.restored = line
        process.run = str(line.fields.get("run") or process.run)


def _place_of(lane: Lane, line: Written) -> int:
    after = bisect_right(lane.starts, line.order, key=lambda start: start.order)
    return max(after - 1, 0)


def grouped(lane: Lane, processes: Sequence[Process]) -> list[tuple[str, list[int]]]:
    """Ids of the runs, and the positions of their processes; in the order of their last start."""
    runs: list[tuple[str, list[int]]] = []
    for place, process in enumerate(processes):
        known = [run for run in runs if process.run and run[0] == process.run]
        if not known and runs and _goes_on(lane, processes, runs[-1][1], process):
            known = [runs[-1]]
        if known:
            runs.remove(known[0])
            runs.append((known[0][0], [*known[0][1], place]))
        else:
            runs.append((process.run, [place]))
    return runs


def _goes_on(
    lane: Lane, processes: Sequence[Process], members: list[int], process: Process
) -> bool:
    """A framework may load its own checkpoint: then steps go on above 0, where others ended."""
    if process.restored is not None or not process.first_step:
        return False
    reached = 0
    for place in members:
        before = processes[place]
        reached = max(reached, max(lane.step[before.first : before.end], default=-1) + 1)
    return process.first_step <= reached


def matched(
    own: Sequence[Process], main: Sequence[Process], rank: int
) -> list[tuple[Process, int]]:
    """The processes of another rank, each with the place of the one it was started with."""
    found = []
    for process in own:
        candidates = [place for place, other in enumerate(main) if _has_rank(other, rank)]
        if not candidates:
            continue
        place = min(candidates, key=lambda place: _apart(process, main[place]))
        found.append((process, place))
    return found


def _has_rank(process: Process, rank: int) -> bool:
    world = process.header.get("world")
    return not isinstance(world, int) or rank < world


def _apart(first: Process, second: Process) -> float:
    if first.time is None or second.time is None:
        return abs(first.start - second.start)
    return abs(first.time - second.time)

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
    runs: dict[int, tuple[str, list[int]]] = {}
    by_name: dict[str, int] = {}
    reached: dict[int, int] = {}
    latest = -1
    for place, process in enumerate(processes):
        key = by_name.get(process.run, -1) if process.run else -1
        if key < 0 and latest >= 0 and _goes_on(process, reached[latest]):
            key = latest
        if key < 0:
            key = place
            runs[key] = (process.run, [])
            by_name.setdefault(process.run, key)
        # Last in the order of the dict: this run was started last.
        runs[key] = runs.pop(key)
        runs[key][1].append(place)
        steps = max(lane.step[process.first : process.end], default=-1) + 1
        reached[key] = max(reached.get(key, 0), steps)
        latest = key
    return list(runs.values())


def _goes_on(process: Process, reached: int) -> bool:
    """A framework may load its own checkpoint: then steps go on above 0, where others ended."""
    if process.restored is not None or not process.first_step:
        return False
    return process.first_step <= reached


def matched(own: Sequence[Process], main: Sequence[Process], rank: int) -> dict[int, list[Process]]:
    """The processes of another rank, by the place of the one each was started with."""
    candidates = [process for process in main if _has_rank(process, rank)]
    by_start = [(float(process.start), process.start) for process in candidates]
    by_time = sorted((one.time, one.start) for one in candidates if one.time is not None)
    found: dict[int, list[Process]] = {}
    for process in own if candidates else ():
        timed = process.time is not None and bool(by_time)
        wanted = process.time if process.time is not None and timed else float(process.start)
        keys = by_time if timed else by_start
        after = bisect_right(keys, (wanted, len(main)))
        _, place = min(keys[max(0, after - 1) : after + 1], key=lambda one: abs(one[0] - wanted))
        found.setdefault(place, []).append(process)
    return found


def _has_rank(process: Process, rank: int) -> bool:
    world = process.header.get("world")
    return not isinstance(world, int) or rank < world

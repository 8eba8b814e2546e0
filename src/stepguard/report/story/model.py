"""What a story consists of: plain records and numpy columns. See the package for the whole."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepguard._errors import JournalError
from stepguard.journal import SCHEMA
from stepguard.records import Incident
from stepguard.records.codec import from_jsonable, restore_floats
from stepguard.records.probes import Look

# --- What a story consists of: plain records and numpy columns. See the package for the whole.


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Done = Literal[
    "partial", "dropped", "retried", "undone", "rewound", "stopped", "let_through", "raised", "told"
]
"""What was really done about a bad step.

`partial`: the update was made without what was bad. `dropped`: there was no update. `retried`:
there was none, and the same step was run again. `undone`: the update was taken back. `let_through`:
it was made as it was. `raised`: the program's own exception went on. `told`: there was no step to
act on.
"""
LeftBy = Literal["rewind", "restart", "restore", "repeat"]
CheckpointState = Literal["good", "kept", "refused", "rewound_to", "restored"]
"""`kept`: whole and finite, but not called good. `refused`: not written; the text says why."""
Ending = Literal["running", "closed", "error", "signal", "stopped", "killed"]
"""How an attempt ended.

`running`: no end was written, nothing came after it, and its process is not known to be gone.
`killed`: no end was written, and the process is gone or another one has started since.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One quantity: its values as they were read, NaN and Inf among them, and their rows."""

    name: str
    rows: Ints
    values: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def finite(self) -> Bools:
        """Which of the values are finite."""
        return np.isfinite(self.values)

    def where(self, mask: Bools) -> Series:
        """The part of the series whose rows are set in `mask` (one entry for each row)."""
        chosen = mask[self.rows]
        return Series(self.name, self.rows[chosen], self.values[chosen])


NOTHING = Series("", np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepTable:
    """The step lines of one rank of a run, one row each, in the order in which they were written.

    `series` has `loss`, `loss/NAME` (components), `grad_norm`, `grad_norm_clipped`, `clip_factor`,
    `scale`, `lr`, `lr/1`, ..., `labels`, `seconds`, `followed/NAME`; only those that were seen.
    """

    rank: int = 0
    step: Ints
    """Number of the optimizer step; the same one may come again."""
    committed: Bools
    """Was an update made?"""
    kept: Bools
    """Does it still count? Not after a rewind or a restart below it."""
    attempt: Ints
    """Index into `Run.attempts`."""
    branch: Ints
    """Index into `Run.branches` (into this rank's own stretches for other ranks)."""
    incident: Ints
    """Index into `Run.incidents`; -1 where nothing was wrong."""
    calibration: Bools
    """Dropped by a GradScaler that looks for its scale: normal."""
    series: Mapping[str, Series] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def counts(self) -> Bools:
        """Rows whose update is part of the present weights."""
        return self.kept & self.committed

    @property
    def dropped(self) -> Bools:
        """Rows without an update because something was wrong."""
        return ~self.committed & ~self.calibration

    def column(self, name: str) -> Series:
        """The series of this name; an empty one where no step has it."""
        return self.series.get(name, NOTHING)

    def values(self, name: str, mask: Bools | None = None) -> Floats:
        """Finite values of a series in the order of time, of all rows or of those in `mask`."""
        series = self.column(name)
        if mask is not None:
            series = series.where(mask)
        return series.values[series.finite]

    def last(self, name: str) -> float | None:
        """The value of the last row, whatever it is; None where that row has none."""
        series = self.column(name)
        if not len(series) or series.rows[-1] != len(self) - 1:
            return None
        return float(series.values[-1])

    def rates(self, row: int) -> tuple[float, ...]:
        """Learning rate of each parameter group in one row."""
        found = []
        for name in ("lr", *(f"lr/{group}" for group in range(1, len(self.series)))):
            series = self.column(name)
            at = int(np.searchsorted(series.rows, row))
            if at >= len(series) or series.rows[at] != row:
                break
            found.append(float(series.values[at]))
        return tuple(found)

    @property
    def elapsed(self) -> Floats:
        """Seconds of training up to each row, over all attempts; pauses between them left out."""
        taken = np.zeros(len(self))
        series = self.column("seconds")
        usable = series.finite & (series.values > 0)
        taken[series.rows[usable]] = series.values[usable]
        return np.cumsum(taken)


EMPTY = StepTable(
    step=np.zeros(0, np.int64),
    committed=np.zeros(0, np.bool_),
    kept=np.zeros(0, np.bool_),
    attempt=np.zeros(0, np.int64),
    branch=np.zeros(0, np.int64),
    incident=np.zeros(0, np.int64),
    calibration=np.zeros(0, np.bool_),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Why and to where a branch was left."""

    by: LeftBy
    """`repeat`: the step number went back without a word of why."""
    to: int
    """The next step is this one: rows of it and above no longer count."""
    came_from: int
    """The highest step of the branch."""
    text: str = ""
    incident: int | None = None
    """Index of the incident that asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Rows `first_row` to `end_row` (not included) without going back."""

    attempt: int
    first_row: int
    end_row: int
    left: Left | None = None
    """None for the last one, which the run is on."""

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.end_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryIncident:
    """An incident, and where in the story it belongs."""

    incident: Incident
    done: Done
    attempt: int
    row: int | None
    """The row of its step in `Run.steps`; None where there is none."""
    at: int
    """Rows written before it."""
    order: int
    """Its place among everything that was written, for sorting by time."""
    kept: bool
    """Is its step part of the line that led to the present weights?"""
    ranks: tuple[int, ...] = ()
    """Ranks that recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Any other line: a note, a rewind, a fault of the guard, the end."""

    type: str
    kind: str
    text: str
    step: int | None
    attempt: int
    at: int
    """Rows written before it."""
    order: int
    fields: Mapping[str, Any]
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """A checkpoint was written, refused, or gone back to."""

    step: int
    state: CheckpointState
    text: str
    path: str
    attempt: int
    at: int
    order: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One process of a run."""

    start: int
    """Which start in this folder it was, from 1."""
    header: Mapping[str, Any]
    first_row: int
    end_row: int
    ending: Ending
    restored: int | None = None
    """Optimizer steps of the checkpoint it began with; None for a fresh start."""
    checkpoint: str = ""
    error: str = ""
    """The exception that ended it, in words."""
    signal: str = ""
    """The name of the signal that ended it."""
    alive: bool | None = None
    """Does its process still exist? None where that cannot be known, or does not matter."""

    @property
    def time(self) -> float | None:
        """When it started, in seconds since 1970."""
        value = self.header.get("time")
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Run:
    """One run: all its attempts, on all ranks."""

    id: str
    """As in the seals of its checkpoints; empty in old journals."""
    number: int
    """Which run of this folder it is, from 1."""
    path: Path
    """The journal that `steps` are of."""
    attempts: tuple[Attempt, ...]
    branches: tuple[Branch, ...]
    steps: StepTable
    by_rank: Mapping[int, StepTable]
    incidents: tuple[StoryIncident, ...]
    notes: tuple[Note, ...]
    checkpoints: tuple[CheckpointEvent, ...]
    looks: tuple[Look, ...] = ()
    """Deep looks at healthy steps, oldest first."""
    torn: int = 0
    """Lines of the whole folder that cannot be read."""
    further: tuple[Run, ...] = ()
    """The same run as the guards of its further optimizers have recorded it."""

    @property
    def lanes(self) -> tuple[Run, ...]:
        """One for each optimizer, the first one's included."""
        return (replace(self, further=()), *self.further) if self.further else (self,)

    @property
    def name(self) -> str:
        """What the user calls the optimizer."""
        return str(self.header.get("name") or self.header.get("optimizer") or "optimizer")

    @property
    def header(self) -> Mapping[str, Any]:
        """Facts of the last attempt: versions, settings, optimizer."""
        return self.attempts[-1].header if self.attempts else {}

    @property
    def began(self) -> float | None:
        return self.attempts[0].time if self.attempts else None

    @property
    def world(self) -> int:
        """Processes of the last attempt."""
        world = self.header.get("world", 1)
        return world if isinstance(world, int) else 1

    @property
    def ended(self) -> bool:
        """Was the last attempt closed, by whatever, with all its optimizers?"""
        over = bool(self.attempts) and self.attempts[-1].ending != "running"
        return over and all(lane.ended for lane in self.further)

    @property
    def goings_back(self) -> tuple[Left, ...]:
        """Rewinds, restarts and repetitions, in time."""
        return tuple(branch.left for branch in self.branches if branch.left is not None)

    @property
    def last_step(self) -> int | None:
        """Number of the last step that was seen."""
        return int(self.steps.step[-1]) if len(self.steps) else None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Story:
    """Every run of a folder."""

    path: Path
    """What was read: the folder, or the one journal."""
    runs: tuple[Run, ...]
    """Oldest first; at least one, which may be empty."""
    torn: int = 0
    elsewhere: tuple[Path, ...] = ()
    """Folders below with journals of other runs."""

    @property
    def latest(self) -> Run:
        return self.runs[-1]

    @property
    def empty(self) -> bool:
        """Was no line read that stepguard writes?"""
        return not any(run.attempts for run in self.runs)


# --- One journal file, taken in line by line into columns and lists, in the order of its lines.


PLAIN = ("loss", "grad_norm", "clip_factor", "scale", "labels", "seconds")
"""Fields of a step line that are one number each."""
NAMED = {"components": "loss/", "followed": "followed/"}
"""Fields that hold numbers by the user's names, and what goes before these in the series."""
LARGEST_STEP = 2**62
LATEST_TIME = 2.5e11
HEADER: dict[str, type | tuple[type, ...]] = {
    "time": (int, float),
    "run": str,
    "attempt": int,
    "rank": int,
    "world": int,
    "optimizer": str,
    "parameters": int,
    "lr": list,
    "versions": dict,
    "config": dict,
    "settings": dict,
}
"""Kinds of the header's fields; one of another kind was not written by us, and is left out."""


@dataclass(slots=True)
class Start:
    """A process opened the journal."""

    header: dict[str, Any]
    at: int
    """Rows written before it."""
    order: int


@dataclass(slots=True)
class Written:
    """An incident or another line, and when it was written."""

    fields: dict[str, Any]
    at: int
    order: int
    incident: Incident | None = None


@dataclass(slots=True)
class ValuesOfRows:
    """Rows that have a value, and the values."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Lane:
    """The journal of one rank."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.step = array("q")
        self.committed = array("b")
        self.series: dict[str, ValuesOfRows] = {}
        self.starts: list[Start] = []
        self.incidents: list[Written] = []
        self.notes: list[Written] = []
        self.torn = 0
        self.lines = 0

    def take(self, line: bytes, *, with_steps: bool = True) -> None:
        """Take in one line; one that cannot be read is counted."""
        self.lines += 1
        if not line.strip():
            return
        if not with_steps and b'"type":"step"' in line:
            return
        fields = _parsed(line)
        if fields is None:
            self.torn += 1
            return
        self._refuse_newer(fields.get("v"))
        self._sort(str(fields["type"]), fields)

    def _refuse_newer(self, version: object) -> None:
        if not isinstance(version, int) or version > SCHEMA:
            raise JournalError(
                f"{self.path} line {self.lines} has schema {version!r}; this stepguard reads up to "
                f"{SCHEMA}: upgrade it."
            )

    def _sort(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            self._take_step(fields)
            return
        if not self.starts and kind != "run":
            # A journal that was not begun by a guard of ours.
            self.starts.append(Start({}, 0, 0))
        if kind == "run":
            self.starts.append(Start(_header(fields), len(self.step), self.lines))
        elif kind == "incident":
            self._take_incident(fields)
        else:
            self.notes.append(Written(fields, len(self.step), self.lines))

    def _take_incident(self, fields: dict[str, Any]) -> None:
        value = fields.get("incident")
        try:
            incident = from_jsonable(Incident, value)  # type: ignore[arg-type]
        except (ValueError, TypeError):  # pydantic's ValidationError is a ValueError
            self.torn += 1
            return
        self.incidents.append(Written({}, len(self.step), self.lines, incident))

    def _take_step(self, fields: dict[str, Any]) -> None:
        number = fields.get("step")
        if not isinstance(number, int) or abs(number) > LARGEST_STEP:
            self.torn += 1
            return
        if not self.starts:
            self.starts.append(Start({}, 0, 0))
        row = len(self.step)
        self.step.append(number)
        self.committed.append(bool(fields.get("committed", True)))
        for name in PLAIN:
            value = fields.get(name)
            if value is not None:
                self._add(name, row, value)
        rates = fields.get("lr")
        if rates is not None:
            self._add_rates(row, rates)
        for name, prefix in NAMED.items():
            named = fields.get(name)
            if isinstance(named, dict):
                for own, value in named.items():
                    self._add(prefix + own, row, value)

    def _add_rates(self, row: int, rates: object) -> None:
        # Journals of other loops may hold a single number.
        groups = rates if isinstance(rates, list) else [rates]
        for group, rate in enumerate(groups):
            # The first group keeps the plain name: most runs have one only.
            self._add(f"lr/{group}" if group else "lr", row, rate)

    def _add(self, name: str, row: int, value: object) -> None:
        if not isinstance(value, int | float):
            return
        column = self.series.get(name)
        if column is None:
            column = self.series[name] = ValuesOfRows()
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        column.rows.append(row)
        column.values.append(number)


def _header(fields: dict[str, Any]) -> dict[str, Any]:
    fitting: dict[str, Any] = {
        name: value for name, value in fields.items() if isinstance(value, HEADER.get(name, object))
    }
    # Beyond the years that a calendar has, or no time at all.
    if not 0 <= fitting.get("time", 0) < LATEST_TIME:
        del fitting["time"]
    if not all(isinstance(rate, int | float) for rate in fitting.get("lr", ())):
        del fitting["lr"]
    return fitting


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The fields of a line; None where it is none of ours."""
    try:
        fields = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or "type" not in fields:
        return None
    incident = fields["type"] == "incident"
    # Most lines hold finite numbers only; an incident is restored with its record.
    if not incident and (b'_kind"' in line or b'"~float"' in line):
        restored: dict[str, Any] = restore_floats(fields)
        return restored
    return fields


def words(fields: Mapping[str, Any]) -> str:
    """What a line says to people."""
    named = ("summary", "error", "message", "reason", "detail", "status", "path")
    return next((str(fields[name]) for name in named if fields.get(name)), "")


def whole_lines(data: bytes) -> Iterator[bytes]:
    """Lines as the writer ends them: by a newline only."""
    yield from data.split(b"\n")


# --- The processes that wrote a journal: what each wrote, and which of them belong to one run.


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

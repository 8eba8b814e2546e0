"""The story of a run folder, read by report, plot, compare, live, doctor and the page.

    story = read_story(Path("runs/demo"))     # a folder, or one journal file
    run = story.latest                        # the last run started in that folder
    run.steps.step                            # numpy columns, one row for each step line, in time
    run.steps.series["loss"]                  # `rows` into the columns, and `values` as they were
    run.steps.kept                            # does this row's step still count?

The lines of a journal say which attempt and branch they belong to; here they are grouped by that.
An `Attempt` is one process. It continues an earlier `Run` if it restored a checkpoint of that run,
or if its steps begin above 0 where that run had come to; else it begins a run.

Rows, incidents and notes are in the order in which they were written, and refer to each other by
row. A step number may occur many times. A `Branch` is a stretch of rows without going back. Where
it ended by going back, `Branch.left` says why and to which step; rows of that step and above are
not `kept`. The kept rows, in order, are the line that led to the present weights.

Non-finite values stay in their series; a step that has no value has no row in it.

`run.steps` is of one rank (the lowest, or the one asked for); `run.by_rank` has the step numbers of
all ranks. An incident that several ranks recorded is one `StoryIncident` with all their `ranks`.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from stepguard._errors import JournalError
from stepguard.journal import (
    LONGEST_LINE,
    belongs_to_run_above,
    is_journal,
    is_running,
    journal_path,
    parse_line,
)
from stepguard.records import Incident
from stepguard.records.codec import record
from stepguard.records.probes import Look

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


@record(eq=False)
class StepTable:
    """The step lines of one rank of a run, one row each, in the order in which they were written.

    `series` has `loss`, `loss/NAME` (components), `grad_norm`, `grad_norm_clipped`, `clip_factor`,
    `scale`, `lr`, `lr/1`, ..., `labels`, `seconds`, `followed/NAME`; only those that were seen.
    """

    step: Ints
    """Number of the optimizer step; the same one may come again."""
    committed: Bools
    """Was an update made?"""
    kept: Bools
    """Does it still count? Not after a rewind or a restart below it."""
    attempt: Ints
    """Index into `Run.attempts`."""
    branch: Ints
    """Index into `Run.branches`."""
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

    @property
    def highest_rate(self) -> Series:
        """The highest learning rate of the parameter groups."""
        rates = np.full(len(self), -np.inf)
        for series in self.series.values():
            if series.name.partition("/")[0] == "lr":
                np.maximum.at(rates, series.rows, series.values)
        rows = np.flatnonzero(np.isfinite(rates))
        return Series("lr", rows, rates[rows])


class Left(NamedTuple):
    """Why and to where a branch was left."""

    by: LeftBy
    """`repeat`: the step number went back, and nothing says why."""
    to: int
    """The next step is this one: rows of it and above no longer count."""
    came_from: int
    """The highest step of the branch."""
    text: str = ""
    incident: int | None = None
    """Index of the incident that asked for it."""


class Branch(NamedTuple):
    """Rows `first_row` to `end_row` (not included) without going back."""

    attempt: int
    first_row: int
    end_row: int
    left: Left | None = None
    """None for the last one, which the run is on."""

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.end_row)


class StoryIncident(NamedTuple):
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

    @property
    def rows_before(self) -> int:
        """Rows before its step."""
        return self.at if self.row is None else self.row


@record
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


class Attempt(NamedTuple):
    """One process of a run."""

    header: Mapping[str, Any]
    ending: Ending
    restored: int | None = None
    """Optimizer steps of the checkpoint it began with; None for a fresh start."""
    error: str = ""
    """The exception that ended it, in words."""
    signal: str = ""
    """The name of the signal that ended it."""
    alive: bool | None = None
    """Does its process still exist? None where that cannot be known, or does not matter."""

    @property
    def time(self) -> float | None:
        """When it started, in seconds since 1970."""
        return self.header.get("time")


@record(eq=False)
class Run:
    """One run: all its attempts, on all ranks."""

    id: str
    """The run's id, as its checkpoint seals state it."""
    number: int
    """Which run of this folder it is, from 1."""
    path: Path
    """The journal that `steps` are of."""
    attempts: tuple[Attempt, ...]
    branches: tuple[Branch, ...]
    steps: StepTable
    by_rank: Mapping[int, Ints]
    """Step numbers of each rank whose journal was read."""
    incidents: tuple[StoryIncident, ...]
    notes: tuple[Note, ...]
    looks: tuple[Look, ...] = ()
    """Deep looks at healthy steps, oldest first."""
    torn: int = 0
    """Lines of the whole folder that cannot be read."""
    further: tuple[Run, ...] = ()
    """Records of the run by the guards of its further optimizers."""

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
        return int(self.header.get("world", 1))

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


@record(eq=False)
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


# --- The lines of one journal, grouped by the attempt that wrote them.


PLAIN = ("loss", "grad_norm", "clip_factor", "scale", "labels", "seconds")
"""Fields of a step line that are one number each."""
NAMED = {"components": "loss/", "followed": "followed/"}
"""Fields that hold numbers by the user's names, and what goes before these in the series."""
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
"""Kinds of the header's fields; one of another kind was not written by us, and is dropped."""
CARRIED = ("v", "type", "branch")
"""Fields of every line, which are no facts of the run."""
TEXTS = ("summary", "error", "message", "reason", "detail", "status", "path")
"""Fields of a line that are for people, the first that is there."""


class _Start:
    """What one process wrote into one journal, with rows counted from its first step line."""

    def __init__(self, header: dict[str, Any], rank: int, place: int) -> None:
        self.header: dict[str, Any] = {
            name: value
            for name, value in header.items()
            if name not in CARRIED and isinstance(value, HEADER.get(name, object))
        }
        # Beyond the years that a calendar has, or not a time at all.
        if not 0 <= self.header.get("time", 0) < 2.5e11:
            del self.header["time"]
        if not all(isinstance(rate, int | float) for rate in self.header.get("lr", ())):
            del self.header["lr"]
        self.rank = rank
        self.time: float = self.header.get("time", place)
        self.run: str = self.header.get("run", "")
        self.restored: int | None = None
        """Steps of a checkpoint that was loaded before the first step."""
        self.step = array("q")
        self.committed = array("b")
        self.series: dict[str, tuple[array[int], array[float]]] = {}
        self.looks: list[Look] = []
        self.lines: list[tuple[int, int, dict[str, Any]]] = []
        """Rows before it, order in the journal and fields of every other line."""
        self.rows: dict[str, int] = {}
        """The row of each incident, by the incident's id."""
        self.branches: list[tuple[int, dict[str, Any]]] = []
        """Rows before each branch, and the fields of its first line."""
        self.rewound: dict[int, str] = {}
        """Branch -> id of the incident that asked for it."""
        self.end: dict[str, Any] | None = None
        self.stopped_at: int | None = None
        """Rows before the last incident, if that stopped the run."""
        self.attempt = 0
        """Which attempt of its run it is."""
        self.first = 0
        """Rows of the run before it."""

    def take(self, fields: dict[str, Any], order: int) -> bool:
        """Take in one line of this process; False for a step line without a step."""
        kind = fields["type"]
        rows = len(self.step)
        if kind == "step" and not _is_step(fields.get("step")):
            return False
        if _is_step(fields.get("from_step")):
            if not rows:
                self.branches = []
            # Not where a journal was opened again without a `run` line.
            if not rows or kind != "step" or fields["from_step"] <= self.step[-1]:
                self.branches.append((rows, fields))
        if kind == "step":
            self._take_step(fields, rows)
            return True
        if kind == "look":
            self.looks.append(fields["look"])
            return True
        self.lines.append((rows, order, fields))
        if kind == "incident":
            self._take_incident(fields["incident"], bool(fields.get("of_last_step")))
        elif kind == "end":
            self.end = fields
        elif fields.get("kind") == "restored" and not rows:
            self.restored = _int(fields.get("step"))
            self.run = str(fields.get("run") or self.run)
        return True

    def _take_incident(self, incident: Incident, of_last_step: bool) -> None:
        rows = len(self.step)
        if of_last_step and rows:
            self.rows[incident.id] = rows - 1
        back = incident.decision and incident.decision.rewound_to
        if self.branches and self.branches[-1][1]["from_step"] == back:
            self.rewound[len(self.branches) - 1] = incident.id
        self.stopped_at = None
        if incident.stopped:
            self.stopped_at = rows

    def _take_step(self, fields: dict[str, Any], row: int) -> None:
        self.step.append(fields["step"])
        self.committed.append(bool(fields.get("committed", True)))
        if isinstance(fields.get("incident"), str):
            self.rows[fields["incident"]] = row
        values = {name: fields.get(name) for name in PLAIN}
        rates = fields.get("lr")
        for group, rate in enumerate(rates if isinstance(rates, list) else [rates]):
            # The first group keeps the plain name: most runs have one only.
            values[f"lr/{group}" if group else "lr"] = rate
        for name, prefix in NAMED.items():
            numbers = fields.get(name)
            if isinstance(numbers, dict):
                values |= {prefix + part: value for part, value in numbers.items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                rows, column = self.series.setdefault(name, (array("q"), array("d")))
                rows.append(row)
                try:
                    column.append(value)
                except OverflowError:
                    column.append(float("inf"))

    def ended(self, *, last: bool, alive: bool | None) -> Attempt:
        """Say how it ended; `alive`: does the process that started last still exist?"""
        end = self.end or {}
        if not last:
            alive = None
        # One that catches TrainingHalted and continues has rows after it.
        stopped = self.stopped_at is not None and self.stopped_at >= len(self.step) - 1
        ways: dict[Ending, object] = {
            "stopped": stopped,
            "error": end.get("error"),
            "signal": end.get("signal"),
            "closed": self.end is not None,
            "killed": not last or alive is False,
            "running": True,
        }
        return Attempt(
            header=self.header,
            ending=next(ending for ending, holds in ways.items() if holds),
            restored=self.restored,
            error=str(end.get("error") or ""),
            signal=str(end.get("signal") or ""),
            alive=alive,
        )


def _is_step(value: object) -> bool:
    return isinstance(value, int) and abs(value) <= 2**62


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _text(fields: Mapping[str, Any]) -> str:
    return next((str(fields[name]) for name in TEXTS if fields.get(name)), "")


CHUNK = 1 << 22
HEAD = 256
"""Bytes at a journal's beginning by which it is known again."""


class JournalFile:
    """One journal, read as far as it has been written: whole lines only, each once."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.replaced = 0
        """How often another file was found at the path, or this one was cut."""
        self._inode: int | None = None
        self._begin()

    def _begin(self) -> None:
        self.starts: list[_Start] = []
        self._by_attempt: dict[object, _Start] = {}
        self.torn = 0
        self._lines = 0
        self._offset = 0
        self._head = b""
        self._in_long_line = False

    def take(self, line: bytes, *, numbers_only: bool = False) -> None:
        """Take in one line; one that cannot be read is counted.

        `numbers_only`: of a step nothing but its number is kept.
        """
        self._lines += 1
        if numbers_only and self.starts and (found := _STEP.match(line)):
            self.starts[-1].step.append(int(found[1]))
            return
        if not line.strip():
            return
        fields = parse_line(line, self.path, self._lines)
        if fields is None:
            self.torn += 1
            return
        if fields["type"] == "run" or not self.starts:
            # A journal that no guard of ours has begun has lines before the first `run`.
            header = fields if fields["type"] == "run" else {}
            start = _Start(header, self.rank, len(self.starts))
            self.starts.append(start)
            self._by_attempt[start.header.get("attempt", len(self.starts))] = start
        if fields["type"] == "run":
            return
        start = self._by_attempt.get(_int(fields.get("attempt")), self.starts[-1])
        if not start.take(fields, self._lines):
            self.torn += 1

    def read(self, *, numbers_only: bool, torn_end: bool) -> bool:
        """Take in what was written since; `torn_end`: half a line at the end counts as torn."""
        if not self.path.is_file():
            return False
        rest = b""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(HEAD)
            same = status.st_ino == self._inode and head.startswith(self._head)
            if self._inode is not None and not (same and status.st_size >= self._offset):
                self.replaced += 1
                self._begin()
            self._inode, self._head = status.st_ino, head
            before = self._offset
            file.seek(before)
            while chunk := file.read(CHUNK):
                self._offset += len(chunk)
                if self._in_long_line:
                    _, ended, chunk = chunk.partition(b"\n")
                    self._in_long_line = not ended
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.take(line, numbers_only=numbers_only)
                if len(rest) > LONGEST_LINE:
                    self.torn += 1
                    self._in_long_line = True
                    rest = b""
        if rest and torn_end:
            self.take(rest, numbers_only=numbers_only)
        elif rest:
            self._offset -= len(rest)
        return self._offset > before or torn_end


# --- The journals of a folder, read once or while they are written.


_STEP = re.compile(rb'\{"v":\d+,"type":"step",[^{]*?"step":(\d{1,18}),')
_RANK = re.compile(r"journal(?:\.rank([0-9]{1,9}))?\.jsonl")


def read_story(run: Path, rank: int | None = None) -> Story:
    """Read a run folder, or one journal file.

    `rank` is whose steps `Run.steps` holds: by default the lowest there is. Raises JournalError
    where there is no journal, or a newer one.
    """
    reader = StoryReader(run, rank)
    if not reader.exists():
        missing = reader.main_path if run.exists() else run
        raise JournalError(
            f"{missing} does not exist; give a run directory that holds a journal.jsonl, or the "
            f"file itself."
        )
    reader.read(torn_end=True)
    return reader.story()


class StoryReader:
    """Reads the journals of a run that may still be written to."""

    def __init__(self, run: Path, rank: int | None = None, *, alone: bool = False) -> None:
        """`alone`: folders of further optimizers are not read."""
        self.run = run
        self._asked = rank
        self._alone = alone
        self._files: dict[int, JournalFile] = {}
        self._story: Story | None = None
        self._further: dict[Path, StoryReader] = {}
        """Readers of the folders of further optimizers of the same run."""
        self._alive: bool | None = None
        """Does the process that started last still exist?"""

    @property
    def is_folder(self) -> bool:
        # A run folder may not exist yet: its name tells it from a file.
        return self.run.is_dir() or (not self.run.exists() and not self.run.suffix)

    @property
    def restarts(self) -> int:
        """How often a journal was replaced or cut while it was followed."""
        return sum(file.replaced for file in self._files.values())

    @property
    def main_path(self) -> Path:
        """The journal whose steps are shown."""
        return journal_path(self.run, self._main) if self.is_folder else self.run

    @property
    def _main(self) -> int:
        return min(self._journals(), default=0) if self._asked is None else self._asked

    def exists(self) -> bool:
        return is_journal(self.main_path) if self.is_folder else self.run.is_file()

    def read(self, *, torn_end: bool = False) -> bool:
        """Take in what was written since; False if that is nothing.

        `torn_end`: nothing more will come, so half a line at the end counts as torn.
        """
        fresh = self._read_files(torn_end)
        alive = None
        if self._main in self._files and self._files[self._main].starts:
            alive = is_running(self._files[self._main].starts[-1].header.get("process"))
        if alive is False:
            # it may have written its end just before it was found gone
            fresh |= self._read_files(torn_end)
        fresh |= alive is not self._alive
        self._alive = alive
        if fresh:
            self._story = None
        return fresh

    def _read_files(self, torn_end: bool) -> bool:
        fresh = False
        for rank, path in self._journals().items():
            file = self._files.setdefault(rank, JournalFile(path, rank))
            other = self.is_folder and rank != self._main
            fresh |= file.read(numbers_only=other, torn_end=torn_end)
        for folder in () if self._alone else self.run.glob("optimizer*"):
            # the folders of at most 16 further optimizers are read
            known = folder in self._further or len(self._further) >= 16
            if not known and belongs_to_run_above(folder):
                reader = StoryReader(folder, self._asked, alone=True)
                self._further[folder] = reader
        for reader in self._further.values():
            fresh |= reader.read(torn_end=torn_end)
        return fresh

    def story(self) -> Story:
        """The model of everything that was read so far."""
        if self._story is None:
            found = {path.parent for path in self.run.glob("*/journal.jsonl")}
            elsewhere = tuple(sorted(found - self._further.keys()))
            files = {self._main: JournalFile(self.main_path, self._main), **self._files}
            story = build_story(self.run, files, self._main, self._alive)
            lanes: list[Run] = []
            for _, reader in sorted(self._further.items()):
                lanes += reader.story().runs
            runs = []
            for run in story.runs:
                # Guards of one process share an id.
                further = tuple(lane for lane in lanes if _ids(lane) & _ids(run))
                runs.append(replace(run, further=further))
            self._story = replace(story, runs=tuple(runs), elsewhere=elsewhere)
        return self._story

    def _journals(self) -> dict[int, Path]:
        """The journals there are, by rank."""
        if not self.is_folder:
            found = _RANK.fullmatch(self.run.name)
            if found and found[1]:
                return {int(found[1]): self.run}
            return {self._asked or 0: self.run}
        journals = {}
        for path in self.run.glob("journal*.jsonl"):
            found = _RANK.fullmatch(path.name)
            if found and is_journal(path):
                journals[int(found[1] or 0)] = path
        return dict(sorted(journals.items()))


def _ids(run: Run) -> set[str]:
    return {run.id, *(attempt.header.get("run", "") for attempt in run.attempts)} - {""}


# --- The lines of all ranks, grouped into runs.


DONE: dict[str, Done] = {
    "leave_out": "partial",
    "retry": "retried",
    "undo": "undone",
    "rewind": "rewound",
    "stop": "stopped",
}
"""What each action of a decision did, where that is not to drop the step."""


def build_story(
    path: Path, files: Mapping[int, JournalFile], main: int, alive: bool | None = None
) -> Story:
    """The story of one folder. `alive`: does the process that started last still exist?"""
    starts = files[main].starts
    torn = sum(file.torn for file in files.values())
    # The processes of one attempt start at about the same time.
    times = sorted((start.time, place) for place, start in enumerate(starts))
    siblings: dict[int, list[_Start]] = {}
    for rank in sorted(files.keys() - {main}):
        for start in files[rank].starts if starts else ():
            siblings.setdefault(id(starts[_matched(start, times)]), []).append(start)
    runs = []
    for number, (name, own) in enumerate(_grouped(starts) or [("", [])], start=1):
        attempts: list[Attempt] = []
        rows = 0
        for start in own:
            start.attempt, start.first = len(attempts), rows
            rows += len(start.step)
            attempts.append(start.ended(last=start is starts[-1], alive=alive))
        others = []
        for start in own:
            for other in siblings.get(id(start), ()):
                other.attempt = start.attempt
                others.append(other)
        by_rank = {}
        for rank in files:
            by_rank[rank] = _joined(one.step for one in (*own, *others) if one.rank == rank)
        run = Run(
            id=name,
            number=number,
            path=files[main].path,
            attempts=tuple(attempts),
            by_rank=by_rank,
            torn=torn,
            **_events(own, others),
        )
        runs.append(run)
    return Story(path=path, runs=tuple(runs), torn=torn)


def _joined(columns: Iterable[array[int]]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *map(np.array, columns)])


def _grouped(starts: Sequence[_Start]) -> list[tuple[str, list[_Start]]]:
    """Ids of the runs and their starts, in the order of their last start."""
    runs: dict[int, tuple[str, list[_Start]]] = {}
    by_name: dict[str, int] = {}
    reached: dict[int, int] = {}
    latest = -1
    for place, start in enumerate(starts):
        key = by_name.get(start.run, -1)
        goes_on = start.step and start.restored is None
        if key < 0 and goes_on and 0 < start.step[0] <= reached.get(latest, 0):
            # A framework loaded its own checkpoint: steps begin where the run before had come to.
            key = latest
        if key < 0:
            key = place
            runs[key] = (start.run, [])
            if start.run:
                by_name[start.run] = key
        # Last in the order of the dict: this run was started last.
        runs[key] = runs.pop(key)
        runs[key][1].append(start)
        reached[key] = max(reached.get(key, 0), max(start.step, default=-1) + 1)
        latest = key
    return list(runs.values())


def _matched(start: _Start, times: Sequence[tuple[float, int]]) -> int:
    """The position of the main rank's start that is nearest in time; -1 where there is none."""
    after = bisect_right(times, (start.time, len(times)))
    near = times[max(after - 1, 0) : after + 1]
    return min(((abs(time - start.time), place) for time, place in near), default=(0.0, -1))[1]


class _Back(NamedTuple):
    """Where the run went back: rows before it, whose branch it ended, which incident asked."""

    at: int
    by: LeftBy
    to: int
    text: str
    attempt: int
    incident: str


def _goings_back(own: Sequence[_Start]) -> Iterator[_Back]:
    for start in own:
        for place, (at, fields) in enumerate(start.branches):
            if not start.attempt and not at:
                continue
            by: Any = fields.get("by")
            attempt = start.attempt
            if not at:
                # It ends the branch of the attempt before it.
                by = "restart"
                attempt -= 1
            elif by not in get_args(LeftBy):
                by = "repeat"
            asked = start.rewound.get(place, "")
            yield _Back(start.first + at, by, fields["from_step"], _text(fields), attempt, asked)


def _events(own: Sequence[_Start], others: Sequence[_Start]) -> dict[str, Any]:
    """Steps, branches, incidents and notes of a run; `others` are the starts of other ranks."""
    step = _joined(start.step for start in own)
    backs = list(_goings_back(own))
    # A row counts unless the run later went back to its step or below.
    lowest = np.full(len(step) + 1, np.iinfo(np.int64).max, np.int64)
    for back in backs:
        lowest[back.at] = min(lowest[back.at], back.to)
    kept = step < np.minimum.accumulate(lowest[::-1])[::-1][1:]
    found: dict[tuple[int, str], StoryIncident] = {}
    notes: list[Note] = []
    for start in own:
        for before, order, fields in start.lines:
            _add_line(found, notes, start, fields, start.first + before, order)
        for name, row in start.rows.items():
            told = found.get((start.attempt, name))
            if told is not None:
                done = _done(told.incident, start.committed[row])
                at = start.first + row
                found[start.attempt, name] = told._replace(done=done, row=at, kept=bool(kept[at]))
    for start in others:
        main = own[start.attempt]
        for _, order, fields in start.lines:
            # At its place among the rows of the main rank.
            earlier = np.array(main.step) <= (_int(fields.get("step")) or 0)
            at = main.first + int(np.flatnonzero(earlier).max(initial=-1)) + 1
            if fields["type"] in ("incident", "fault"):
                # Added to the order of what other ranks wrote: it comes after what this rank wrote
                # by then
                _add_line(found, notes, start, fields, at, order + (10**12))
    notes.sort(key=lambda note: (note.at, note.order))
    incidents = sorted(found.values(), key=lambda one: (one.at, one.order))
    places = {(one.attempt, one.incident.id): place for place, one in enumerate(incidents)}
    branches = []
    first = 0
    for back in backs:
        left = Left(
            by=back.by,
            to=back.to,
            came_from=int(step[first : back.at].max(initial=back.to)),
            text=back.text,
            incident=places.get((back.attempt, back.incident)),
        )
        branches.append(Branch(attempt=back.attempt, first_row=first, end_row=back.at, left=left))
        first = back.at
    branches.append(Branch(attempt=max(len(own) - 1, 0), first_row=first, end_row=len(step)))
    looks = []
    for start in own:
        looks += start.looks
    return {
        "steps": _table(own, step, kept, branches, places),
        "branches": tuple(branches),
        "incidents": tuple(incidents),
        "notes": tuple(notes),
        "looks": tuple(looks),
    }


def _add_line(
    found: dict[tuple[int, str], StoryIncident],
    notes: list[Note],
    start: _Start,
    fields: dict[str, Any],
    at: int,
    order: int,
) -> None:
    """Add an incident, once for all ranks, or a note."""
    incident = fields.get("incident")
    if isinstance(incident, Incident):
        key = (start.attempt, incident.id)
        told = StoryIncident(
            incident=incident,
            done=_done(incident, None),
            attempt=start.attempt,
            row=None,
            at=at,
            order=order,
            kept=True,
        )
        told = found.get(key, told)
        found[key] = told._replace(ranks=tuple(sorted({*told.ranks, start.rank})))
        return
    note = Note(
        type=fields["type"],
        kind=str(fields.get("kind", "")),
        text=_text(fields),
        step=_int(fields.get("step")),
        attempt=start.attempt,
        at=at,
        order=order,
        fields=fields,
    )
    notes.append(note)


def _table(
    own: Sequence[_Start],
    step: Ints,
    kept: Bools,
    branches: Sequence[Branch],
    places: Mapping[tuple[int, str], int],
) -> StepTable:
    committed = _joined(start.committed for start in own).astype(np.bool_)
    attempt = np.zeros(len(step), np.int64)
    branch_of = np.zeros(len(step), np.int64)
    incident = np.full(len(step), -1, np.int64)
    parts: dict[str, list[tuple[Ints, Floats]]] = {}
    for place, branch in enumerate(branches):
        branch_of[branch.rows] = place
    for start in own:
        attempt[start.first :] = start.attempt
        for name, row in start.rows.items():
            incident[start.first + row] = places.get((start.attempt, name), -1)
        for name, (at, found) in start.series.items():
            parts.setdefault(name, []).append((np.array(at) + start.first, np.array(found)))
    series = {}
    for name, pieces in parts.items():
        rows, values = map(np.concatenate, zip(*pieces, strict=True))
        series[name] = Series(name, rows, values)
    if "grad_norm" in series and "clip_factor" in series:
        norm, factor = series["grad_norm"], series["clip_factor"]
        both, ours, theirs = np.intersect1d(
            norm.rows, factor.rows, assume_unique=True, return_indices=True
        )
        with np.errstate(invalid="ignore"):
            values = norm.values[ours] * np.minimum(factor.values[theirs], 1.0)
        series["grad_norm_clipped"] = Series("grad_norm_clipped", both, values)
    scaled = np.zeros(len(step), np.bool_)
    scaled[series.get("scale", NOTHING).rows] = True
    return StepTable(
        step=step,
        committed=committed,
        kept=kept,
        attempt=attempt,
        branch=branch_of,
        incident=incident,
        calibration=~committed & scaled & (incident < 0),
        series=series,
    )


def _done(incident: Incident, committed: int | None) -> Done:
    action = incident.decision.action if incident.decision is not None else "note"
    if incident.verdict.kind == "exception" and action == "stop":
        return "raised"
    if action != "note":
        return DONE.get(action, "dropped")
    if committed is None:
        return "told"
    return "let_through" if committed else "dropped"

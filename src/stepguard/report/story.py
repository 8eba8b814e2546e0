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

Non-finite values stay in their series; a step that has no value has no row in it. Lines that
cannot be read are counted in `torn`.

`run.steps` is of one rank (the lowest, or the one asked for); `run.by_rank` has the step numbers of
all ranks that were read. An incident that several ranks recorded is one `StoryIncident` with all of
their `ranks`.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

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
from stepguard.records.probes import Look

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

StepsOf = Literal["one", "all"]
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
    def last_rates(self) -> list[float]:
        """Learning rate of each parameter group in the last row."""
        names = ["lr", *(f"lr/{group}" for group in range(1, len(self.series)))]
        return [rate for rate in map(self.last, names) if rate is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
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
class Attempt:
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Run:
    """One run: all its attempts, on all ranks."""

    id: str
    """As in the seals of its checkpoints."""
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


# --- The lines of one journal, grouped by the attempt that wrote them.


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
"""Kinds of the header's fields; one of another kind was not written by us, and is dropped."""
CARRIED = ("v", "type", "branch")
"""Fields of every line, which are no facts of the run."""
BEGUN_BY = {"step": "repeat", "note": "restore"}
"""What a branch was begun by, where that is not a rewind."""


class _Start:
    """What one process wrote into one journal, with rows counted from its first step line."""

    def __init__(self, header: dict[str, Any], rank: int) -> None:
        self.header: dict[str, Any] = {
            name: value
            for name, value in header.items()
            if name not in CARRIED and isinstance(value, HEADER.get(name, object))
        }
        # Beyond the years that a calendar has, or not a time at all.
        if not 0 <= self.header.get("time", 0) < LATEST_TIME:
            del self.header["time"]
        if not all(isinstance(rate, int | float) for rate in self.header.get("lr", ())):
            del self.header["lr"]
        self.rank = rank
        self.run: str = self.header.get("run", "")
        self.restored: Mapping[str, Any] = {}
        """The note of a checkpoint that was loaded before the first step."""
        self.step = array("q")
        self.committed = array("b")
        self.series: dict[str, tuple[array[int], array[float]]] = {}
        self.looks: list[Look] = []
        self.lines: list[tuple[int, int, dict[str, Any]]] = []
        """Rows before it, order in the journal and fields of every other line."""
        self.rows: dict[str, int] = {}
        """The row of each incident, by the incident's id."""
        self.branches: list[dict[str, Any]] = []
        """Rows before each branch, its first step, and what began it."""
        self.attempt = 0
        """Which attempt of its run it is."""
        self.first = 0
        """Rows of the run before it."""
        self._unlinked = False
        """Is the last row without an incident?"""

    def take(self, fields: dict[str, Any], order: int) -> bool:
        """Take in one line of this process; False for a step line without a step."""
        kind = fields["type"]
        step: Any = fields.get("step")
        if kind == "step" and not (isinstance(step, int) and abs(step) <= LARGEST_STEP):
            return False
        to = fields.get("from_step")
        if isinstance(to, int) and abs(to) <= LARGEST_STEP:
            self._take_branch(fields, to)
        if kind == "step":
            self._take_step(fields)
            return True
        if kind == "look":
            self.looks.append(fields["look"])
            return True
        self.lines.append((len(self.step), order, fields))
        if kind == "incident":
            self._take_incident(fields["incident"])
        elif fields.get("kind") == "restored" and not self.step:
            self.restored = fields
            self.run = str(fields.get("run") or self.run)
        return True

    def _take_branch(self, fields: Mapping[str, Any], to: int) -> None:
        by = BEGUN_BY.get(fields["type"], "rewind")
        if not self.step:
            self.branches = []
            by = "restart"
        elif by == "repeat" and to > self.step[-1]:
            return  # the journal was opened again without a `run` line
        branch = {"at": len(self.step), "to": to, "by": by, "text": _text(fields)}
        self.branches.append({**branch, "incident": None})

    def _take_incident(self, incident: Incident) -> None:
        row = len(self.step) - 1
        raised = incident.verdict.kind == "exception"
        fits = self._unlinked and self.step[row] == incident.step
        if fits and not (raised and self.committed[row]):
            self.rows[incident.id] = row
            self._unlinked = False
        if incident.decision is not None and self.branches:
            last = self.branches[-1]
            if (last["at"], last["to"]) == (row + 1, incident.decision.rewound_to):
                last["incident"] = incident.id

    def _take_step(self, fields: dict[str, Any]) -> None:
        row = len(self.step)
        self.step.append(fields["step"])
        self.committed.append(bool(fields.get("committed", True)))
        named = fields.get("incident")
        self._unlinked = not isinstance(named, str)
        if isinstance(named, str):
            self.rows[named] = row
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


def _text(fields: Mapping[str, Any]) -> str:
    """The text of a line for people."""
    named = ("summary", "error", "message", "reason", "detail", "status", "path")
    return next((str(fields[name]) for name in named if fields.get(name)), "")


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

    def take(self, line: bytes, *, with_steps: bool = True) -> None:
        """Take in one line; one that cannot be read is counted."""
        self._lines += 1
        if not line.strip() or (not with_steps and b'"type":"step"' in line):
            return
        fields = parse_line(line, self.path, self._lines)
        if fields is None:
            self.torn += 1
            return
        if fields["type"] == "run":
            start = _Start(fields, self.rank)
            self.starts.append(start)
            self._by_attempt[start.header.get("attempt", len(self.starts))] = start
            return
        if not self.starts:
            # A journal that no guard of ours has begun.
            self.starts.append(_Start({}, self.rank))
        start = self._by_attempt.get(_int(fields.get("attempt")), self.starts[-1])
        if not start.take(fields, self._lines):
            self.torn += 1

    def read(self, *, with_steps: bool, torn_end: bool) -> bool:
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
                    self.take(line, with_steps=with_steps)
                if len(rest) > LONGEST_LINE:
                    self.torn += 1
                    self._in_long_line = True
                    rest = b""
        if rest and torn_end:
            self.take(rest, with_steps=with_steps)
        elif rest:
            self._offset -= len(rest)
        return self._offset > before or torn_end


# --- The journals of a folder, read once or while they are written.


MOST_OPTIMIZERS = 16
"""Further optimizers of a run that are read."""
_RANK = re.compile(r"journal(?:\.rank([0-9]{1,9}))?\.jsonl")


def read_story(run: Path, rank: int | None = None, *, steps_of: StepsOf = "one") -> Story:
    """Read a run folder, or one journal file.

    `rank` is whose steps `Run.steps` holds: by default the lowest there is. `steps_of="all"` reads
    the steps of every rank. Raises JournalError where there is no journal, or a newer one.
    """
    reader = StoryReader(run, rank, steps_of=steps_of)
    if not reader.exists():
        missing = reader.main_path if run.exists() else run
        raise JournalError(
            f"{missing} does not exist; give a run directory that holds a journal.jsonl, or the "
            f"file itself."
        )
    reader.read(torn_end=True)
    return reader.story()


def story_of(lines: Iterable[bytes], path: Path = Path("journal.jsonl")) -> Story:
    """The story of the lines of one journal, as if they had been read from `path`."""
    journal = JournalFile(path, 0)
    for line in lines:
        journal.take(line)
    return _build(path, {0: journal}, 0)


class StoryReader:
    """Reads the journals of a run that may still be written to."""

    def __init__(self, run: Path, rank: int | None = None, *, steps_of: StepsOf = "one") -> None:
        self.run = run
        self._asked = rank
        self._steps_of = steps_of
        self._files: dict[int, JournalFile] = {}
        self._story: Story | None = None
        self._further: dict[Path, StoryReader] = {}
        """Readers of the folders of further optimizers of the same run."""
        self._has_further = self.is_folder
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
        file = self._files.get(self._main)
        process = file.starts[-1].header.get("process") if file and file.starts else None
        alive = is_running(process)
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
            with_steps = self._steps_of == "all" or rank == self._main or not self.is_folder
            fresh |= file.read(with_steps=with_steps, torn_end=torn_end)
        for folder in self.run.glob("optimizer*") if self._has_further else ():
            known = folder in self._further or len(self._further) >= MOST_OPTIMIZERS
            if not known and belongs_to_run_above(folder):
                further = StoryReader(folder, self._asked, steps_of=self._steps_of)
                further._has_further = False
                self._further[folder] = further
        for reader in self._further.values():
            fresh |= reader.read(torn_end=torn_end)
        return fresh

    def story(self) -> Story:
        """The model of everything that was read so far."""
        if self._story is None:
            found = {path.parent for path in self.run.glob("*/journal.jsonl")}
            elsewhere = tuple(sorted(found - self._further.keys()))
            files = self._files
            if self._main not in files:
                files = {**files, self._main: JournalFile(self.main_path, self._main)}
            story = _build(self.run, files, self._main, self._alive)
            runs = tuple(self._with_further(run) for run in story.runs)
            self._story = replace(story, runs=runs, elsewhere=elsewhere)
        return self._story

    def _with_further(self, run: Run) -> Run:
        """The run with what its further optimizers recorded: guards of one process share an id."""
        further = []
        for _, reader in sorted(self._further.items()):
            further += [other for other in reader.story().runs if _ids(other) & _ids(run)]
        return replace(run, further=tuple(further))

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


FOREIGN = 10**12
"""Added to the order of what other ranks wrote: it comes after what this rank wrote by then."""
DONE: dict[str, Done] = {
    "leave_out": "partial",
    "retry": "retried",
    "undo": "undone",
    "rewind": "rewound",
    "stop": "stopped",
}
"""What each action of a decision did, where that is not to drop the step."""


def _build(
    path: Path, files: Mapping[int, JournalFile], main: int, alive: bool | None = None
) -> Story:
    """The story of one folder. `alive`: does the process that started last still exist?"""
    starts = files[main].starts
    others: dict[int, list[_Start]] = {}
    for rank in sorted(files.keys() - {main}):
        for start, place in _matched(files[rank].starts, starts, rank):
            others.setdefault(place, []).append(start)
    torn = sum(file.torn for file in files.values())
    runs = []
    for number, (name, members) in enumerate(_grouped(starts) or [("", [])], start=1):
        theirs: list[_Start] = []
        attempts = []
        by_rank: dict[int, list[array[int]]] = {rank: [] for rank in files}
        rows = 0
        for attempt, place in enumerate(members):
            last = place == len(starts) - 1
            attempts.append(_attempt(starts[place], last=last, alive=alive))
            starts[place].first = rows
            rows += len(starts[place].step)
            theirs += others.get(place, [])
            for start in (starts[place], *others.get(place, ())):
                start.attempt = attempt
                by_rank[start.rank].append(start.step)
        own = [starts[place] for place in members]
        run = Run(
            id=name,
            number=number,
            path=files[main].path,
            attempts=tuple(attempts),
            by_rank={rank: _joined(columns) for rank, columns in by_rank.items()},
            torn=torn,
            **_run(own, theirs),
        )
        runs.append(run)
    return Story(path=path, runs=tuple(runs), torn=torn)


def _joined(columns: Iterable[array[int]]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *map(np.array, columns)])


def _matched(
    starts: Sequence[_Start], main: Sequence[_Start], rank: int
) -> Iterator[tuple[_Start, int]]:
    """The starts of another rank, and the position of the main rank's start nearest in time."""
    times = []
    for place, start in enumerate(main):
        if rank < start.header.get("world", rank + 1):
            times.append((start.header.get("time", place), place))
    times.sort()
    for place, start in enumerate(starts if times else ()):
        time = start.header.get("time", place)
        after = bisect_right(times, (time, len(main)))
        near = times[max(after - 1, 0) : after + 1]
        yield start, min((abs(known - time), nearest) for known, nearest in near)[1]


def _grouped(starts: Sequence[_Start]) -> list[tuple[str, list[int]]]:
    """Ids of the runs, and the positions of their starts; in the order of their last start."""
    runs: dict[int, tuple[str, list[int]]] = {}
    by_name: dict[str, int] = {}
    reached: dict[int, int] = {}
    latest = -1
    for place, start in enumerate(starts):
        key = by_name.get(start.run, -1)
        first = start.step[0] if start.step and not start.restored else 0
        if key < 0 and 0 < first <= reached.get(latest, 0):
            # A framework loaded its own checkpoint: steps begin where the run before had come to.
            key = latest
        if key < 0:
            key = place
            runs[key] = (start.run, [])
            if start.run:
                by_name[start.run] = key
        # Last in the order of the dict: this run was started last.
        runs[key] = runs.pop(key)
        runs[key][1].append(place)
        reached[key] = max(reached.get(key, 0), max(start.step, default=-1) + 1)
        latest = key
    return list(runs.values())


def _attempt(start: _Start, *, last: bool, alive: bool | None) -> Attempt:
    end: Mapping[str, Any] | None = None
    stopped = False
    for at, _, fields in start.lines:
        if fields["type"] == "end":
            end = fields
        elif fields["type"] == "incident":
            # One that catches TrainingHalted and continues has rows after it.
            stopped = fields["incident"].stopped and at >= len(start.step) - 1
    said = end or {}
    ending: Ending = "running"
    if not last:
        alive = None
    if stopped:
        ending = "stopped"
    elif said.get("error"):
        ending = "error"
    elif said.get("signal"):
        ending = "signal"
    elif end is not None:
        ending = "closed"
    elif not last or alive is False:
        ending = "killed"
    return Attempt(
        header=start.header,
        ending=ending,
        restored=_int(start.restored.get("step")),
        error=str(said.get("error") or ""),
        signal=str(said.get("signal") or ""),
        alive=alive,
    )


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _run(own: Sequence[_Start], others: Sequence[_Start]) -> dict[str, Any]:
    """Steps, branches, incidents and notes of a run; `others` are the starts of other ranks."""
    step = _joined(start.step for start in own)
    backs = []
    for start in own:
        for branch in start.branches:
            if start.attempt or branch["at"]:
                # A restart ends the branch of the attempt before it.
                ended = start.attempt - (branch["by"] == "restart")
                backs.append((start.first + branch["at"], ended, branch))
    # A row counts unless the run later went back to its step or below.
    lowest = np.full(len(step) + 1, np.iinfo(np.int64).max, np.int64)
    for at, _, branch in backs:
        lowest[at] = min(lowest[at], branch["to"])
    kept: Bools = step < np.minimum.accumulate(lowest[::-1])[::-1][1:]
    incidents, notes = _events(own, others, step, kept)
    looks = []
    for start in own:
        looks += start.looks
    places = {(one.attempt, one.incident.id): place for place, one in enumerate(incidents)}
    branches = []
    first = 0
    for at, attempt, branch in backs:
        left = Left(
            by=branch["by"],
            to=branch["to"],
            came_from=int(step[first:at].max()) if at > first else branch["to"],
            text=branch["text"],
            incident=places.get((attempt, branch["incident"])),
        )
        branches.append(Branch(attempt=attempt, first_row=first, end_row=at, left=left))
        first = at
    last = max(len(own) - 1, 0)
    branches.append(Branch(attempt=last, first_row=first, end_row=len(step)))
    ends = [at for at, _, _ in backs]
    branch_of = np.searchsorted(ends, np.arange(len(step)), side="right").astype(np.int64)
    return {
        "steps": _table(own, step, kept, branch_of, places),
        "branches": tuple(branches),
        "incidents": tuple(incidents),
        "notes": tuple(notes),
        "looks": tuple(looks),
    }


def _table(
    own: Sequence[_Start],
    step: Ints,
    kept: Bools,
    branch: Ints,
    places: Mapping[tuple[int, str], int],
) -> StepTable:
    committed = _joined(start.committed for start in own).astype(np.bool_)
    attempt = np.zeros(len(step), np.int64)
    incident = np.full(len(step), -1, np.int64)
    parts: dict[str, list[tuple[Ints, Floats]]] = {}
    for start in own:
        attempt[start.first :] = start.attempt
        for name, row in start.rows.items():
            incident[start.first + row] = places.get((start.attempt, name), -1)
        for name, (at, found) in start.series.items():
            parts.setdefault(name, []).append((np.array(at) + start.first, np.array(found)))
    series = {}
    for name, pieces in parts.items():
        rows, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
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
        rank=own[0].rank if own else 0,
        step=step,
        committed=committed,
        kept=kept,
        attempt=attempt,
        branch=branch,
        incident=incident,
        calibration=~committed & scaled & (incident < 0),
        series=series,
    )


def _events(
    own: Sequence[_Start], others: Sequence[_Start], step: Ints, kept: Bools
) -> tuple[list[StoryIncident], list[Note]]:
    """Incidents and all other lines in the order of time; of other ranks, incidents and faults."""
    found: dict[tuple[int, str], StoryIncident] = {}
    notes = []
    for start in (*own, *others):
        main = own[start.attempt]
        for before, order, fields in start.lines:
            incident = fields.get("incident")
            at = start.first + before
            if start is not main:
                # At its place among the rows of the main rank.
                earlier = step[main.first :][: len(main.step)] <= (_int(fields.get("step")) or 0)
                at = main.first + int(np.flatnonzero(earlier).max(initial=-1)) + 1
                order += FOREIGN
            if not isinstance(incident, Incident):
                if start is main or fields["type"] == "fault":
                    notes.append(_note(start, fields, at, order))
                continue
            key = (start.attempt, incident.id)
            if key in found and start is not main:
                ranks = tuple(sorted({*found[key].ranks, start.rank}))
                found[key] = replace(found[key], ranks=ranks)
                continue
            told = StoryIncident(
                incident=incident,
                done=_done(incident, None),
                attempt=start.attempt,
                row=None,
                at=at,
                order=order,
                kept=True,
                ranks=(start.rank,),
            )
            if start is main and incident.id in start.rows:
                own_row = start.rows[incident.id]
                done = _done(incident, start.committed[own_row])
                row = start.first + own_row
                told = replace(told, done=done, row=row, kept=bool(kept[row]))
            found[key] = told
    notes.sort(key=lambda note: (note.at, note.order))
    return sorted(found.values(), key=lambda one: (one.at, one.order)), notes


def _note(start: _Start, fields: Mapping[str, Any], at: int, order: int) -> Note:
    return Note(
        type=fields["type"],
        kind=str(fields.get("kind", "")),
        text=_text(fields),
        step=_int(fields.get("step")),
        attempt=start.attempt,
        at=at,
        order=order,
        fields=fields,
        rank=start.rank,
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

"""What a story consists of: plain records and numpy columns. See the package for the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepguard.records import Incident
from stepguard.records.look import Look

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

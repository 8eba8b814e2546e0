"""The run's append-only journal: strict JSON lines, one writer per rank, readable after a crash.

Every line carries `attempt` (which start in this folder wrote it) and `branch` (its timeline: a
rewind, a restored checkpoint or a step that is run again begins the next one); the first line of a
branch says `from_step`, its first step, and `by`, what began it. An incident's line holds the
incident, and says `of_last_step` where it is about the step line before it; a step line that is
written after its incident names it by its id.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepguard._errors import JournalError
from stepguard.records.codec import LineFile, dumps, from_jsonable, restore_floats, to_plain
from stepguard.records.incident import Incident, Reading, Sink
from stepguard.records.probes import Look

SCHEMA = 2
"""Raised when a line's meaning changes; readers refuse what is newer than themselves."""


def journal_path(run_dir: Path, rank: int = 0) -> Path:
    """Rank 0 writes `journal.jsonl`, the others `journal.rank<k>.jsonl`."""
    if rank == 0:
        return run_dir / "journal.jsonl"
    return run_dir / f"journal.rank{rank}.jsonl"


@dataclass(slots=True)
class _Progress:
    """How far the run has come: what the next line carries, and what the last one would say."""

    attempt: int = 1
    branch: int = 1
    steps: int = 0
    """Step lines of this attempt."""
    next_step: int | None = None
    """The lowest step without an update on this branch; None before the first branch."""
    begun: dict[str, Any] = field(default_factory=dict)
    """`from_step` and `by` of a branch that no line has reported yet."""
    last: tuple[int, bool] | None = None
    """Step of the last step line and whether it was committed, while no incident belongs to it."""
    noted: Incident | None = None
    """An incident whose step line is still to come."""
    end: dict[str, Any] | None = None
    """The fields of the `end` line; None while no run is open."""
    pid: int = field(default_factory=os.getpid)

    def begin_branch(self, first_step: int, by: str) -> None:
        if self.steps:
            self.branch += 1
        else:
            by = "restart"
        self.next_step = first_step
        self.begun = {"from_step": first_step, "by": by}

    def line(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        carried = {"v": SCHEMA, "type": kind, "attempt": self.attempt, "branch": self.branch}
        return (dumps({**carried, **self.begun, **fields}) + "\n").encode()


class Journal(Sink):
    """Appends lines, each by one `write` of a whole record: a crash can tear only the last one.

    A line that cannot be written raises OSError and leaves nothing of itself behind. A journal that
    nobody closed writes its `end` itself: when it is collected, because model and optimizer are
    gone while the process continues, and when the interpreter exits.
    """

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = journal_path(run_dir, rank)
        self._file = LineFile(self.path)
        self._progress = _Progress()
        self._rates: Any = ()
        """The learning rates that were encoded last; most steps have the same."""
        self._rates_encoded = ""
        weakref.finalize(self, _write_end, self._file, self._progress)

    def write(self, kind: str, fields: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append one record; `durable` waits until it is on disk."""
        progress = self._progress
        if kind == "run":
            progress.attempt = fields.get("attempt", progress.attempt)
            progress.branch, progress.steps, progress.next_step = 1, 0, None
        elif kind == "rewind":
            progress.begin_branch(fields["to"], "rewind")
        elif fields.get("kind") == "restored":
            progress.begin_branch(fields["step"], "restore")
        self._file.append(progress.line(kind, fields), durable=durable)
        progress.begun = {}
        if kind == "run":
            progress.end = {"steps": 0, "incidents": 0, "armed": True}
        elif kind == "end":
            progress.end = None
        elif kind == "fault" and progress.end is not None:
            progress.end["armed"] = False

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.write(kind, fields)

    def step(self, reading: Reading, committed: bool) -> None:
        """One line a step, with only what was seen."""
        progress = self._progress
        if progress.next_step is None or reading.step < progress.next_step:
            progress.begin_branch(reading.step, "repeat")
        # Written in every step, and most of it are plain numbers, which need no encoder.
        text = f'{{"v":{SCHEMA},"type":"step","attempt":{progress.attempt}'
        text += f',"branch":{progress.branch}'
        if progress.begun:
            text += _encoded(progress.begun)
        for name in STEP_FIELDS:
            value = getattr(reading, name)
            kind = type(value)
            if kind is int or (kind is float and value - value == 0.0):
                text += f',"{name}":{value!r}'
            elif value or isinstance(value, NUMBERS):
                text += self._rates_or_more(name, value)
        text += f',"committed":{("false", "true")[committed]}'
        noted = progress.noted
        progress.noted = None
        progress.last = (reading.step, committed)
        if noted is not None and _belongs(noted, *progress.last):
            text += _encoded({"incident": noted.id})
            progress.last = None
        self._file.append(f"{text}}}\n".encode())
        progress.begun = {}
        progress.steps += 1
        if committed:
            progress.next_step = reading.step + 1
        if progress.end is not None:
            progress.end["steps"] = reading.step + 1

    def _rates_or_more(self, name: str, value: Any) -> str:
        if name != "lr":
            return _encoded({name: value})
        if value != self._rates:
            self._rates, self._rates_encoded = value, _encoded({name: value})
        return self._rates_encoded

    def incident(self, incident: Incident) -> None:
        progress = self._progress
        decision = incident.decision
        if decision is not None and decision.action == "stop" and decision.rewound_to is not None:
            # A run that stops with damaged weights leaves the newest good ones in memory.
            progress.begin_branch(decision.rewound_to, "rewind")
        fields = {"step": incident.step, "incident": to_plain(incident)}
        if progress.last is not None and _belongs(incident, *progress.last):
            fields["of_last_step"] = True
        else:
            progress.noted = incident
        progress.last = None
        self.write("incident", fields, durable=True)
        if progress.end is not None:
            progress.end["incidents"] += 1

    def look(self, look: Look) -> None:
        self.write("look", {"step": look.step, "look": to_plain(look)})

    def close(self) -> None:
        self._progress.end = None
        self._file.close()


def _encoded(fields: dict[str, Any]) -> str:
    """Further fields of a line."""
    return f",{dumps(fields)[1:-1]}"


def _belongs(incident: Incident, step: int, committed: bool) -> bool:
    """Is the incident about this step line?"""
    # A step that raised and was run again with success is not the step that raised.
    raised = incident.verdict.kind == "exception"
    return incident.step == step and not (raised and committed)


def _write_end(file: LineFile, progress: _Progress) -> None:
    # a forked child has a copy of the journal, and is not the run
    if progress.end is not None and progress.pid == os.getpid():
        with suppress(OSError):
            file.append(progress.line("end", progress.end))
            file.close()


LONGEST_LINE = 1 << 23
"""Bytes of a line that is read; a longer one is none of ours, and counts as torn."""


def is_journal(path: Path) -> bool:
    """A file of this folder. A link out of it could show anything that its reader may read."""
    if not path.is_file():
        return False
    return not path.is_symlink() or path.resolve().parent == path.parent.resolve()


def belongs_to_run_above(folder: Path) -> bool:
    """Does the journal in this folder say that it is of a further optimizer of one run?"""
    journals = [] if folder.is_symlink() else sorted(folder.glob("journal*.jsonl"))
    for path in filter(is_journal, journals):
        try:
            with path.open("rb") as lines:
                header = json.loads(lines.readline(LONGEST_LINE) or b"{}")
        except (OSError, ValueError, RecursionError):
            continue
        return isinstance(header, dict) and bool(header.get("lane"))
    return False


# --- which runs are below a folder


DEEPEST = 5
"""Folders below the given one in which runs are searched."""
MOST_RUNS = 2000
SKIPPED = frozenset({"incidents", "checkpoints", "capsule", "__pycache__", "node_modules"})


def is_run(folder: Path) -> bool:
    """Does the folder hold a journal?"""
    try:
        return any(is_journal(path) for path in folder.glob("journal*.jsonl"))
    except OSError:
        return False


def runs_below(root: Path) -> dict[str, Path]:
    """Run folders by name: their paths below the root, or the folder's name if it is a run."""
    root = root.resolve()
    if is_run(root):
        return {root.name: root}
    found: dict[str, Path] = {}
    for folder, below, _ in os.walk(root):
        here = Path(folder)
        inside = here.relative_to(root)
        if is_run(here) and not belongs_to_run_above(here):
            found[inside.as_posix()] = here
        below[:] = [name for name in below if name not in SKIPPED and not name.startswith(".")]
        if len(inside.parts) >= DEEPEST or len(found) >= MOST_RUNS:
            below.clear()
    return dict(sorted(found.items()))


# --- which process writes it


def this_process() -> dict[str, Any]:
    """Identify this process for `is_running`: its number, when it began, and where that counts."""
    pid = os.getpid()
    return {"pid": pid, "started": _started(pid), "place": _place()}


def is_running(process: object) -> bool | None:
    """Does the process of a `run` line still exist? None where this machine cannot tell."""
    if not isinstance(process, Mapping) or os.name != "posix" or process.get("place") != _place():
        return None
    pid = process.get("pid")
    started: str | None = process.get("started")
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return None
    if started:
        # another process may have got the number since
        return _started(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it belongs to somebody else
    return True


def _started(pid: int) -> str:
    """When a process began, in the kernel's count; empty where it has ended, or cannot be read."""
    try:
        # the name of the program may have spaces and brackets in it
        facts = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if facts[0] in "ZX" else facts[19]


def _place() -> str:
    """Where a process number means the same process: machine, boot, namespace of processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def starts_in(run_dir: Path, rank: int = 0) -> int:
    """How often a run was started in this folder; 0 where its journal cannot be read."""
    path = journal_path(run_dir, rank)
    # Not a device such as /dev/full, which may never end.
    if not path.is_file():
        return 0
    try:
        with path.open("rb") as lines:
            return sum(b'"type":"run"' in line for line in lines)
    except OSError:
        return 0


NUMBERS = (int, float)
STEP_FIELDS = (
    "step",
    "loss",
    "components",
    "followed",
    "grad_norm",
    "clip_factor",
    "scale",
    "lr",
    "labels",
    "seconds",
)
"""The part of a Reading that every step's line carries."""
_RECORDS = {"incident": Incident, "look": Look}


# --- reading


@dataclass(slots=True)
class RunRecord:
    """A journal read back."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    """The first `run` line: versions, settings, time."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Step lines, oldest first, with non-finite floats restored."""
    incidents: list[Incident] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    """Health probes of healthy steps, oldest first."""
    notes: list[dict[str, Any]] = field(default_factory=list)
    """Everything else worth a line: notes, faults of the guard itself, the end of the run."""
    torn: int = 0
    """Lines that cannot be read: torn by a crash, or an incident that does not fit its record."""


def read_run(run: Path, rank: int = 0) -> RunRecord:
    """Read a run directory or a journal file; raises JournalError with the way out."""
    path = journal_path(run, rank) if run.is_dir() else run
    if not path.is_file():
        raise JournalError(
            f"{path} does not exist; give a run directory that holds a journal.jsonl, or the file "
            f"itself."
        )
    record = RunRecord(path=path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            fields = parse_line(line, path, number)
            if fields is None:
                record.torn += 1
            elif fields["type"] == "step":
                record.steps.append(fields)
            elif fields["type"] == "incident":
                record.incidents.append(fields["incident"])
            elif fields["type"] == "look":
                record.looks.append(fields["look"])
            elif fields["type"] == "run" and not record.header:
                record.header = fields
            else:
                record.notes.append(fields)
    return record


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any] | None:
    """The fields of a line, with records and non-finite floats restored; None for a torn one.

    Raises JournalError for a line of a newer schema.
    """
    try:
        fields: dict[str, Any] = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        return None
    version = fields.get("v")
    if not isinstance(version, int) or version > SCHEMA:
        raise JournalError(
            f"{path} line {number} has schema {version!r}; this stepguard reads up to {SCHEMA}: "
            f"upgrade it."
        )
    kind = fields["type"]
    if kind in _RECORDS:
        try:
            fields[kind] = from_jsonable(_RECORDS[kind], fields[kind])
        except (KeyError, ValueError, TypeError, AttributeError):
            return None
    elif b'_kind"' in line or b'"~float"' in line:
        # Most lines hold finite numbers only.
        restored: dict[str, Any] = restore_floats(fields)
        return restored
    return fields

"""The run's append-only journal: strict JSON lines, one writer per rank, readable after a crash."""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepguard._errors import JournalError
from stepguard.records.codec import LineFile, dumps, from_jsonable, restore_floats, to_plain
from stepguard.records.incident import Incident, Reading, Sink
from stepguard.records.probes import Look

SCHEMA = 1
"""Raised when a line's meaning changes; readers refuse what is newer than themselves."""


def journal_path(run_dir: Path, rank: int = 0) -> Path:
    """Rank 0 writes `journal.jsonl`, the others `journal.rank<k>.jsonl`."""
    if rank == 0:
        return run_dir / "journal.jsonl"
    return run_dir / f"journal.rank{rank}.jsonl"


class Journal(Sink):
    """Appends lines, each by one `write` of a whole record: a crash can tear only the last one.

    A line that cannot be written raises OSError and leaves nothing of itself behind. A journal that
    nobody closed writes its `end` itself: when it is collected, because model and optimizer are
    gone while the process goes on, and when the interpreter exits.
    """

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = journal_path(run_dir, rank)
        self._file = LineFile(self.path)
        self._end = _End()
        weakref.finalize(self, _write_end, self._file, self._end)

    def write(self, kind: str, fields: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append one record; `durable` waits until it is on disk."""
        self._file.append(_line(kind, fields), durable=durable)
        self._end.follow(kind, fields)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.write(kind, fields)

    def step(self, reading: Reading, committed: bool) -> None:
        """One line a step, with only what was seen."""
        fields = {}
        for name in STEP_FIELDS:
            value = getattr(reading, name)
            if value not in (None, (), {}, []):
                fields[name] = value
        self.write("step", {**fields, "committed": committed})

    def incident(self, incident: Incident) -> None:
        self.write("incident", {"incident": to_plain(incident)}, durable=True)

    def look(self, look: Look) -> None:
        self.write("look", {"step": look.step, "look": to_plain(look)})

    def close(self) -> None:
        self._end.open = False
        self._file.close()


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return (dumps({"v": SCHEMA, "type": kind, **fields}) + "\n").encode()


@dataclass(slots=True)
class _End:
    """What the last line of a journal would say by now."""

    open: bool = False
    """A run has begun, and its end is not on record."""
    pid: int = field(default_factory=os.getpid)
    fields: dict[str, Any] = field(default_factory=dict)

    def follow(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "run":
            self.open = True
            start = {"attempt": fields.get("attempt", 1), "steps": 0, "incidents": 0}
            self.fields = {**start, "armed": True}
        elif not self.open:
            return
        elif kind == "step":
            self.fields["steps"] = fields["step"] + 1
        elif kind == "incident":
            self.fields["incidents"] += 1
        elif kind == "fault":
            self.fields["armed"] = False
        elif kind == "end":
            self.open = False


def _write_end(file: LineFile, end: _End) -> None:
    # a forked child has a copy of the journal, and is not the run
    if end.open and end.pid == os.getpid():
        end.open = False
        with suppress(OSError):
            file.append(_line("end", end.fields))
            file.close()


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
    """Deep looks at healthy steps, oldest first."""
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
    for number, line in enumerate(_lines(path), start=1):
        _take(record, line, number)
    return record


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from filter(str.strip, file)


def _take(record: RunRecord, line: str, number: int) -> None:
    try:
        fields = json.loads(line)
    except ValueError:
        record.torn += 1
        return
    if not isinstance(fields, dict) or "type" not in fields:
        record.torn += 1
        return
    version = fields.get("v")
    if not isinstance(version, int) or version > SCHEMA:
        raise JournalError(
            f"{record.path} line {number} has schema {version!r}; this stepguard reads up to "
            f"{SCHEMA}: upgrade it."
        )
    _sort(record, fields["type"], fields)


def _sort(record: RunRecord, kind: str, fields: dict[str, Any]) -> None:
    if kind == "incident":
        _take_incident(record, fields.get("incident"))
        return
    if kind == "look":
        _take_look(record, fields.get("look"))
        return
    plain = restore_floats(fields)
    if kind == "step":
        record.steps.append(plain)
    elif kind == "run" and not record.header:
        record.header = plain
    else:
        record.notes.append(plain)


def _take_look(record: RunRecord, value: Any) -> None:
    try:
        record.looks.append(from_jsonable(Look, value))
    except (ValueError, AttributeError):  # pydantic's ValidationError is a ValueError
        record.torn += 1


def _take_incident(record: RunRecord, value: Any) -> None:
    try:
        record.incidents.append(from_jsonable(Incident, value))
    except ValueError:  # pydantic's ValidationError is one
        record.torn += 1

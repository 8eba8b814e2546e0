"""The ledger of bad samples: `bad_samples.jsonl` in the run folder, one strict JSON line for each
loss.

Lines are only ever appended, each by one `write` of a whole record, so a crash can tear only the
last one.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

from stepguard._errors import JournalError
from stepguard.records.bad_samples import BadSamples
from stepguard.records.codec import dumps, from_jsonable, to_plain

SCHEMA = 1
"""Raised when a line's meaning changes; readers refuse what is newer than themselves."""
_NAME = re.compile(r"bad_samples(?:\.rank(\d+))?\.jsonl")


def ledger_path(run_dir: Path, rank: int = 0) -> Path:
    """Rank 0 writes `bad_samples.jsonl`, the others `bad_samples.rank<k>.jsonl`."""
    return run_dir / ("bad_samples.jsonl" if rank == 0 else f"bad_samples.rank{rank}.jsonl")


class Ledger:
    """Appends lines. The file is made with the first one: a run that loses nothing has none."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self.path = ledger_path(run_dir, rank)
        self.failed = False
        """The file could not be written, and that has been said."""

    def append(self, entry: BadSamples) -> None:
        """One line, on disk when this returns; raises OSError where the disk takes no more."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (dumps({"v": SCHEMA, **to_plain(entry)}) + "\n").encode()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            left = b"\n" + line if _ends_torn(file) else line
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)


def _ends_torn(file: int) -> bool:
    """Has a crash or a full disk left half a line at the end?"""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def read_ledger(run_dir: Path, rank: int | None = None) -> tuple[list[BadSamples], int]:
    """The entries of one rank or of all, oldest first, and how many lines could not be read."""
    paths = _ledgers(run_dir) if rank is None else [ledger_path(run_dir, rank)]
    entries: list[BadSamples] = []
    torn = 0
    for path in paths:
        if not path.is_file():
            continue
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                entry = _entry(path, line, number)
                entries += [entry] if entry is not None else []
                torn += entry is None and bool(line.strip())
    return sorted(entries, key=lambda entry: entry.time), torn


def _ledgers(run_dir: Path) -> list[Path]:
    found = [path for path in run_dir.glob("bad_samples*.jsonl") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: _rank(path))


def _rank(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1] or 0) if match else 0


def _entry(path: Path, line: str, number: int) -> BadSamples | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    version = fields.pop("v", None)
    if isinstance(version, int) and version > SCHEMA:
        raise JournalError(
            f"{path} line {number} has schema {version}; this stepguard reads up to {SCHEMA}: "
            f"upgrade."
        )
    try:
        return replace(from_jsonable(BadSamples, fields), rank=_rank(path))
    except ValueError:  # pydantic's ValidationError is one
        return None

"""The ledger of bad samples: `bad_samples.jsonl` in the run folder, one line for each loss.

Lines are strict JSON and only ever appended, so a crash can tear only the last one.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from stepguard._errors import JournalError
from stepguard.records.checks import BadSamples
from stepguard.records.codec import LineFile, dumps, from_jsonable, to_plain

SCHEMA = 1
"""Raised when a line's meaning changes; readers refuse what is newer than themselves."""
_NAME = re.compile(r"bad_samples(?:\.rank(\d+))?\.jsonl")


def ledger_path(run_dir: Path, rank: int = 0) -> Path:
    """Rank 0 writes `bad_samples.jsonl`, the others `bad_samples.rank<k>.jsonl`."""
    if rank == 0:
        return run_dir / "bad_samples.jsonl"
    return run_dir / f"bad_samples.rank{rank}.jsonl"


class Ledger:
    """Appends lines. The file is made with the first one: a run that loses nothing has none."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self.path = ledger_path(run_dir, rank)
        self.failed = False
        """Writing has failed once, and that has been told."""

    def append(self, entry: BadSamples) -> None:
        """Write one line, on disk when this returns; raises OSError where it cannot."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = dumps({"v": SCHEMA, **to_plain(entry)}) + "\n"
        # Opened for each line: losses are rare, and a run may lose its folder in between.
        file = LineFile(self.path)
        try:
            file.append(line.encode(), durable=True)
        finally:
            file.close()


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
                if entry is not None:
                    entries.append(entry)
                elif line.strip():
                    torn += 1
    return sorted(entries, key=lambda entry: entry.time), torn


def _ledgers(run_dir: Path) -> list[Path]:
    found = [path for path in run_dir.glob("bad_samples*.jsonl") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_rank)


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
    except ValueError:
        # pydantic's ValidationError is one.
        return None

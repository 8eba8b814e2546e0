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
        """Writing has failed once, and that has been reported."""

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
    entries: list[BadSamples] = []
    torn = 0
    for path in sorted(run_dir.glob("bad_samples*.jsonl")):
        named = _NAME.fullmatch(path.name)
        if named is None or not path.is_file() or rank not in (None, int(named[1] or 0)):
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    fields = dict(json.loads(line.decode("utf-8", "replace")))
                    version = fields.pop("v", None)
                    if isinstance(version, int) and version > SCHEMA:
                        raise JournalError(
                            f"{path} line {number} has schema {version}; this stepguard reads up "
                            f"to {SCHEMA}: upgrade."
                        )
                    entry = from_jsonable(BadSamples, fields)
                    entries.append(replace(entry, rank=int(named[1] or 0)))
                except (ValueError, TypeError):  # pydantic's ValidationError is a ValueError
                    torn += bool(line.strip())
    return sorted(entries, key=lambda entry: (entry.time, entry.rank)), torn

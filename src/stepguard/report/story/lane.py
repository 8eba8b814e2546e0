"""One journal file, taken in line by line into columns and lists, in the order of its lines."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepguard._errors import JournalError
from stepguard.journal import SCHEMA
from stepguard.records import Incident
from stepguard.records.codec import from_jsonable, restore_floats
from stepguard.records.old_fields import upgrade_incident

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
            known = upgrade_incident(value) if isinstance(value, dict) else value
            incident = from_jsonable(Incident, known)  # type: ignore[arg-type]
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

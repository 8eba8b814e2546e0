"""The heat map of an incident's card: gradient norms by module in the steps before it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stepguard.records import Incident
from stepguard.records.codec import KINDS

FILE = "gradients.json"
LARGEST = 1 << 21
"""Bytes of the file that are read."""
MOST_MODULES = 64
MOST_STEPS = 64

Heat = dict[str, Any]


def gradient_heat(incident: Incident, run_folder: Path) -> Heat | None:
    """Modules, steps, norms and the first that is not finite; None where nothing fits."""
    path = _file(incident, run_folder)
    if path is None:
        return None
    try:
        table = json.loads(path.read_bytes())
        return _checked(table, incident)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _file(incident: Incident, run_folder: Path) -> Path | None:
    """The file in the incident's folder; None where the id leads elsewhere."""
    name = incident.id if not incident.rank else f"{incident.id}-rank{incident.rank}"
    home = (run_folder / "incidents").resolve()
    try:
        path = (home / name / FILE).resolve()
        fits = path.is_relative_to(home) and path.is_file() and path.stat().st_size <= LARGEST
    except (OSError, ValueError):
        return None
    return path if fits else None


def _checked(table: Any, incident: Incident) -> Heat | None:
    modules = [str(name)[:200] for name in table["modules"]][:MOST_MODULES]
    steps = [int(step) for step in table["steps"]][-MOST_STEPS:]
    rows = []
    for row in table["norms"][: len(modules)]:
        rows.append([_value(value) for value in row[-len(steps) :]])
    if not modules or not steps or any(len(row) != len(steps) for row in rows):
        return None
    if len(rows) != len(modules):
        return None
    return {
        "modules": modules,
        "steps": steps,
        "values": rows,
        "first": _first(rows, modules, incident),
    }


def _value(value: Any) -> float | str | None:
    if isinstance(value, str):
        return value if value in KINDS else None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _first(rows: list[list[Any]], modules: list[str], incident: Incident) -> list[int] | None:
    """The first step with a bad norm; in it the module of the origin, or else the first bad one."""
    for step in range(len(rows[0])):
        bad = [place for place, row in enumerate(rows) if isinstance(row[step], str)]
        if bad:
            return [_origin_among(bad, modules, incident), step]
    return None


def _origin_among(bad: list[int], modules: list[str], incident: Incident) -> int:
    born = incident.origin.module if incident.origin is not None else None
    for place in bad:
        if born and (born == modules[place] or born.startswith(f"{modules[place]}.")):
            return place
    return bad[0]

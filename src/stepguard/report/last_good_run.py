"""What is different from the last run that went well: settings, versions, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stepguard.report.story import Run

ALWAYS_DIFFERENT = (
    *("v", "type", "time", "run", "attempt", "rank", "config.run_dir"),
    *("process.pid", "process.started", "process.place"),
)
NOT_THERE = "-"


def last_good(run: Run, others: Iterable[Run]) -> Run | None:
    """The newest of the others that was closed without an incident, and began before this one."""
    good = []
    for other in others:
        if other is not run and _went_well(other) and (other.began or 0) <= (run.began or 0):
            good.append(other)
    return max(good, key=lambda other: other.began or 0, default=None)


def _went_well(run: Run) -> bool:
    if not run.attempts or run.attempts[-1].ending != "closed":
        return False
    return not run.incidents and bool(len(run.steps))


def differences(good: Run, run: Run) -> list[list[str]]:
    """Name, value in the good run, value now; only what differs. The first row names the runs."""
    before = dict(_flat(good.header))
    now = dict(_flat(run.header))
    rows = []
    for name in {**before, **now}:
        first = before.get(name, NOT_THERE)
        second = now.get(name, NOT_THERE)
        if name not in ALWAYS_DIFFERENT and first != second:
            rows.append([name, first, second])
    if not rows:
        return []
    return [["", _folder(good), "this run"], *rows]


def _folder(run: Run) -> str:
    """The folder of a run, and which of several in it."""
    return f"{run.path.parent.name} (run {run.number})"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)

"""What the journal of a run folder says about earlier attempts: where they started from, and how
they ended.

Read at `restore`, so that a run which is started again by a launcher does not run into the same
wall for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAME_PLACE = 2
"""Starts from one checkpoint that ended in a stop, after which an older one is taken."""


@dataclass(slots=True)
class Attempt:
    """One process's part of a run."""

    run: str = ""
    restored: str | None = None
    """Name of the checkpoint it began with; None for a fresh start."""
    stopped_at: int | None = None
    """The step at which the policy stopped it."""
    lost_steps: set[int] = field(default_factory=set)
    """Steps that were left out because of their data."""
    kinds: list[str] = field(default_factory=list)
    """Verdicts of its incidents, in order."""


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier attempts of this run came to."""

    lost_steps: frozenset[int] = frozenset()
    """Steps that they left out."""
    stopped_at: frozenset[int] = frozenset()
    """Steps at which the policy stopped them."""


def past_of(attempts: list[Attempt]) -> Past:
    """All attempts together."""
    return Past(
        frozenset(step for attempt in attempts for step in attempt.lost_steps),
        frozenset(attempt.stopped_at for attempt in attempts if attempt.stopped_at is not None),
    )


def attempts_in(journal: Path) -> list[Attempt]:
    """Every attempt of this folder, oldest first. Lines that cannot be read are passed over."""
    found: list[Attempt] = []
    for line in _telling_lines(journal):
        if line.get("type") == "run":
            found.append(Attempt(run=str(line.get("run", ""))))
        elif found:
            _take(found[-1], line)
    return found


def failed_starts(attempts: list[Attempt], checkpoint: str) -> int:
    """How many attempts began with this checkpoint and were stopped by the policy."""
    return sum(each.restored == checkpoint and each.stopped_at is not None for each in attempts)


def _take(attempt: Attempt, line: dict[str, Any]) -> None:
    if line.get("type") == "note" and line.get("kind") == "restored":
        attempt.restored = str(line.get("checkpoint") or "") or None
        return
    incident = line.get("incident")
    if line.get("type") != "incident" or not isinstance(incident, dict):
        return
    decision = incident.get("decision") or {}
    verdict = incident.get("verdict") or {}
    attempt.kinds.append(str(verdict.get("kind", "")))
    step = incident.get("step")
    if not isinstance(step, int):
        return
    if decision.get("action") == "stop":
        attempt.stopped_at = step
    if decision.get("left_out") or decision.get("action") == "stop":
        attempt.lost_steps.add(step)


def _telling_lines(journal: Path) -> Iterator[dict[str, Any]]:
    """Headers, notes and incidents; the lines of healthy steps are not parsed."""
    if not journal.is_file():  # a device may never end
        return
    try:
        with journal.open("rb") as lines:
            for line in lines:
                if b'"type":"step"' in line:
                    continue
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue
                if isinstance(fields, dict):
                    yield fields
    except OSError:
        return

"""Read from the journal where earlier attempts of a run started, and how they ended.

Read at `restore`: a run that a launcher starts again and again must not stop at the same step each
time.
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
class PastAttempt:
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
class PastAttempts:
    """What earlier attempts of this run came to."""

    lost_steps: frozenset[int] = frozenset()
    """Steps that they left out."""
    stopped_at: frozenset[int] = frozenset()
    """Steps at which the policy stopped them."""


def past_of(attempts: list[PastAttempt]) -> PastAttempts:
    """Sum up all attempts."""
    lost: set[int] = set()
    stopped: set[int] = set()
    for attempt in attempts:
        lost |= attempt.lost_steps
        if attempt.stopped_at is not None:
            stopped.add(attempt.stopped_at)
    return PastAttempts(frozenset(lost), frozenset(stopped))


def attempts_in(journal: Path) -> list[PastAttempt]:
    """Every attempt in this journal, oldest first. Lines that cannot be read are passed over."""
    found: list[PastAttempt] = []
    for line in _lines(journal):
        if line.get("type") == "run":
            found.append(PastAttempt(run=str(line.get("run", ""))))
        elif found:
            _add(found[-1], line)
    return found


def failed_starts(attempts: list[PastAttempt], checkpoint: str) -> int:
    """How many attempts began with this checkpoint and were stopped by the policy."""
    failed = 0
    for attempt in attempts:
        if attempt.restored == checkpoint and attempt.stopped_at is not None:
            failed += 1
    return failed


def _add(attempt: PastAttempt, line: dict[str, Any]) -> None:
    kind = line.get("type")
    if kind == "note" and line.get("kind") == "restored":
        attempt.restored = str(line.get("checkpoint") or "") or None
    incident = line.get("incident")
    if kind == "incident" and isinstance(incident, dict):
        _add_incident(attempt, incident)


def _add_incident(attempt: PastAttempt, incident: dict[str, Any]) -> None:
    decision = incident.get("decision") or {}
    verdict = incident.get("verdict") or {}
    attempt.kinds.append(str(verdict.get("kind", "")))
    step = incident.get("step")
    if not isinstance(step, int):
        return
    stopped = decision.get("action") == "stop"
    if stopped:
        attempt.stopped_at = step
    if stopped or decision.get("left_out"):
        attempt.lost_steps.add(step)


def _lines(journal: Path) -> Iterator[dict[str, Any]]:
    """Headers, notes and incidents; the lines of healthy steps are not parsed."""
    if not journal.is_file():
        # a device may never end
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

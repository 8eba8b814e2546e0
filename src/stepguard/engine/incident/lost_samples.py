"""What a bad step cost: its line in the ledger of bad samples, and what of the ledger counts after
a resume.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.sample_identity import Part, name_samples, parts_of
from stepguard.engine.interception import borrowing
from stepguard.ledger import Ledger, read_ledger
from stepguard.records import Incident, Origin, Reading
from stepguard.records.bad_samples import BadSamples, Extent, Identity
from stepguard.records.place import place_and_phase
from stepguard.state.skipped_batches import Place
from stepguard.state.step import Step

LOSING = ("leave_out", "skip", "undo", "lower_lr")
"""Actions after which samples have had no part in an update. A stop counts as well, where the data
brought it about.
"""
_MICRO_BATCHES = re.compile(r"micro-batch(?:es)? ([\d, ]+) of")


def note_lost(context: Context, step: Step, incident: Incident) -> None:
    """Write what was lost to the ledger. Never raises: a fault costs the line, and is said once."""
    if context.config.run_dir is None or borrowing() or not _loses(incident):
        return
    if context.ledger is None:
        context.ledger = Ledger(Path(context.config.run_dir), context.agreement.rank)
    try:
        for entry in _entries(context, step, incident):
            context.ledger.append(entry)
    except Exception as fault:
        if not context.ledger.failed:
            context.ledger.failed = True
            summary = (
                f"the ledger of bad samples misses step {incident.step}: "
                f"{type(fault).__name__}: {fault}"
            )
            context.outputs.note("ledger", summary, step=incident.step)


def naming(
    context: Context, find: Callable[[Step, Reading], Origin]
) -> Callable[[Step, Reading], Origin]:
    """The same search, with the samples it proves named by their place in the data set."""

    def found(step: Step, reading: Reading) -> Origin:
        origin = find(step, reading)
        try:
            return name_samples(origin, step, context.feed, context.config.id_key)
        except Exception:  # who the samples are is not worth where they broke
            return origin

    return found


def known_bad(run_dir: Path, rank: int = 0) -> list[BadSamples]:
    """The ledger of one rank, oldest first; empty where there is none that can be read."""
    try:
        return read_ledger(run_dir, rank)[0]
    except Exception:
        return []


def honour_ledger(context: Context) -> None:
    """After a restore: batches that were left out as a step, by what the data did, are not
    delivered again.

    Ranks must deliver the same number of batches: they pass over only what all of them have on
    record, and only in the pass whose order is known.
    """
    feed, run_dir, agreement = context.feed, context.config.run_dir, context.agreement
    entries: list[BadSamples] = []
    if feed is not None and run_dir is not None:
        # every process has drawn a run id of its own: the one of rank 0 is in the checkpoint, and
        # speaks for all
        run_id = context.run_id if agreement.rank == 0 else None
        entries = [
            entry
            for entry in known_bad(Path(run_dir), agreement.rank)
            if _passed_over(entry, run_id)
        ]
    if agreement.size > 1:
        present = feed.epoch if feed is not None else -1
        told = agreement.together(
            lambda: {"lost": [_moment(e) for e in entries if e.epoch == present]}
        )
        common = set.intersection(*({tuple(moment) for moment in facts["lost"]} for facts in told))
        entries = [entry for entry in entries if tuple(_moment(entry)) in common]
    lost: dict[Place, list[BadSamples]] = {}
    for entry in entries:
        lost.setdefault((entry.epoch or 0, entry.batch or 0), []).append(entry)
    if feed is not None and lost:
        causes = {place: found[0].cause for place, found in lost.items()}
        feed.pass_over(lost, causes=causes, indices=_indices(lost) if agreement.size == 1 else None)


def _moment(entry: BadSamples) -> list[int]:
    """The same on every rank for one and the same loss."""
    return [entry.attempt, entry.step, entry.epoch or 0, entry.batch or 0]


def _passed_over(entry: BadSamples, run_id: str | None) -> bool:
    ours = entry.run is None or not run_id or entry.run == run_id
    placed = entry.epoch is not None and entry.batch is not None
    return ours and placed and entry.left_out == "step" and entry.would_fail_again


def _indices(lost: dict[Place, list[BadSamples]]) -> dict[Place, list[Identity]]:
    return {
        place: [i for entry in entries for i in entry.indices or ()]
        for place, entries in lost.items()
    }


def _loses(incident: Incident) -> bool:
    action = incident.decision.action if incident.decision is not None else ""
    if action != "stop":
        return action in LOSING
    phase = incident.origin.phase if incident.origin is not None else ""
    return not incident.reading.bad_state and phase not in ("state", "optimizer", "checkpoint")


def _entries(context: Context, step: Step, incident: Incident) -> list[BadSamples]:
    parts = parts_of(step, context.feed, context.config.id_key) or [Part()]
    sizes = [part.size for part in parts]
    origin, rank = incident.origin, context.agreement.rank
    elsewhere = origin is not None and origin.rank is not None and origin.rank != rank
    guilty = _guilty(incident, len(parts))
    shared: dict[str, Any] = {
        "step": incident.step,
        "run": getattr(context, "run_id", None) or None,
        "attempt": getattr(context, "attempt", 1),
        "rank": rank,
        "time": time.time(),
        "of": 0 if None in sizes else sum(size or 0 for size in sizes),
        "left_out": _extent(incident),
        "cause": incident.findings[0].code if incident.findings else incident.verdict.kind,
        "place": _place(incident),
        "incident": incident.id,
    }
    found = []
    for number, part in enumerate(parts):
        if number not in guilty and shared["left_out"] != "step":
            continue
        innocent = elsewhere or number not in guilty
        found.append(_entry(part, number if len(parts) > 1 else None, innocent, origin, shared))
    return found


def _entry(
    part: Part, micro: int | None, innocent: bool, origin: Origin | None, shared: dict[str, Any]
) -> BadSamples:
    samples = (
        ()
        if innocent or origin is None or (micro or 0) != (origin.micro_batch or 0)
        else origin.samples
    )
    epoch, batch = part.place or (None, None)
    return BadSamples(
        **shared,
        micro_batch=micro,
        samples=samples,
        count=len(samples) if shared["left_out"] == "sample" else part.size or 0,
        indices=part.indices_of(samples),
        ids=part.ids_of(samples),
        epoch=epoch,
        batch=batch,
        innocent=innocent,
    )


def _guilty(incident: Incident, count: int) -> set[int]:
    """Micro-batches that did it; all of them where nobody knows."""
    origin, decision = incident.origin, incident.decision
    words = _MICRO_BATCHES.match(decision.left_out) if decision is not None else None
    if words is not None:
        return {int(number) - 1 for number in words[1].split(",")}
    if origin is not None and origin.micro_batch is not None:
        return {origin.micro_batch}
    return set(incident.reading.bad_micro_batches) or set(range(count))


def _extent(incident: Incident) -> Extent:
    words = incident.decision.left_out if incident.decision is not None else ""
    if words.startswith("sample"):
        return "sample"
    return "micro_batch" if "micro-batch" in words else "step"


def _place(incident: Incident) -> str:
    origin = incident.origin
    if origin is None:
        return incident.verdict.summary
    return place_and_phase(origin)

"""Write what a bad step cost to the ledger of bad samples, and read it again after a restore."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from stepguard.engine.context import Context
from stepguard.engine.incident.sample_identity import (
    BatchPart,
    name_samples,
    parts_of,
    text_of,
)
from stepguard.engine.protect import borrowing
from stepguard.ledger import Ledger, read_ledger
from stepguard.records import Incident, Origin, Reading
from stepguard.records.checks import BadSamples, Extent, Identity
from stepguard.records.incident import place_and_phase
from stepguard.sentinel.rank_agreement import ASKED
from stepguard.state.batch import Step
from stepguard.state.loader import Place


def note_lost(context: Context, step: Step, incident: Incident) -> None:
    """Write what was lost to the ledger. Never raises: a fault costs the line, and is said once."""
    if context.config.run_dir is None or borrowing() or not _loses_samples(incident):
        return
    if context.data.ledger is None:
        context.data.ledger = Ledger(Path(context.config.run_dir), context.agreement.rank)
    try:
        for entry in _entries(context, step, incident):
            context.data.ledger.append(entry)
    except Exception as fault:
        if not context.data.ledger.failed:
            context.data.ledger.failed = True
            summary = (
                f"the ledger of bad samples misses step {incident.step}: "
                f"{type(fault).__name__}: {fault}"
            )
            context.outputs.note("ledger", summary, step=incident.step)


def with_sample_names(
    context: Context, find: Callable[[Step, Reading], Origin]
) -> Callable[[Step, Reading], Origin]:
    """Wrap a search for the origin: the samples it proves are named by their place in the data."""

    def found(step: Step, reading: Reading) -> Origin:
        origin = find(step, reading)
        try:
            origin = name_samples(origin, step, context.data.recent, context.config.id_key)
            if context.config.capsule == "full" and origin.samples:
                text = text_of(
                    step, origin.samples[0], origin.micro_batch or 0, context.data.tokenizer
                )
                origin = replace(origin, excerpt=text)
            return origin
        except Exception:
            # the names of the samples are not worth losing where the step broke
            return origin

    return found


def known_bad(run_dir: Path, rank: int = 0) -> list[BadSamples]:
    """The ledger of one rank, oldest first; empty where there is none that can be read."""
    try:
        return read_ledger(run_dir, rank)[0]
    except Exception:
        return []


def skip_lost_batches(context: Context) -> None:
    """After a restore: do not deliver again the batches that were lost because of their data."""
    feed = context.data.feed
    # Entries of this run and rank whose batch is known and would fail again.
    run_dir = context.config.run_dir
    rank = context.agreement.rank
    if context.data.feed is None or run_dir is None:
        lost_batches = []
    else:
        # every process has drawn a run id of its own: that of rank 0 is in the checkpoint
        run_id = context.run.id if rank == 0 else None
        lost_batches = [
            entry for entry in known_bad(Path(run_dir), rank) if _is_skipped(entry, run_id)
        ]
    entries = _agreed(context, lost_batches)
    if feed is None or not entries:
        return
    causes: dict[Place, str] = {}
    indices: dict[Place, list[Identity]] = {}
    for entry in entries:
        place = (entry.epoch or 0, entry.batch or 0)
        causes.setdefault(place, entry.cause)
        indices.setdefault(place, []).extend(entry.indices or ())
    if context.agreement.size > 1:
        feed.pass_over(causes, causes=causes, indices=None)
    else:
        feed.pass_over(causes, causes=causes, indices=indices)


def _is_skipped(entry: BadSamples, run_id: str | None) -> bool:
    ours = entry.run is None or not run_id or entry.run == run_id
    placed = entry.epoch is not None and entry.batch is not None
    return ours and placed and entry.left_out == "step" and entry.would_fail_again


def _agreed(context: Context, entries: list[BadSamples]) -> list[BadSamples]:
    """What every rank has on record, in the present pass: all must deliver as many batches."""
    if context.agreement.size == 1:
        return entries
    present = context.data.feed.epoch if context.data.feed is not None else -1
    own = [_moment(entry) for entry in entries if entry.epoch == present]
    told = context.agreement.together(lambda: {"lost": own}, "the lost samples", seconds=ASKED)
    common = set(map(tuple, own))
    for facts in told:
        common &= set(map(tuple, facts["lost"]))
    return [entry for entry in entries if tuple(_moment(entry)) in common]


def _moment(entry: BadSamples) -> list[int]:
    """The same on every rank for one and the same loss."""
    return [entry.attempt, entry.step, entry.epoch or 0, entry.batch or 0]


def _loses_samples(incident: Incident) -> bool:
    """Have samples had no part in an update? A stop counts where the data brought it about."""
    if incident.decision is None:
        return False
    match incident.decision.action:
        case "leave_out" | "skip" | "undo":
            return True
        case "retry" | "heal" | "rewind" | "note":
            return False
        case "stop":
            phase = "" if incident.origin is None else incident.origin.phase
            by_state = phase in ("state", "optimizer", "checkpoint")
            return not incident.reading.bad_state and not by_state
        case unknown:
            assert_never(unknown)


def _entries(context: Context, step: Step, incident: Incident) -> list[BadSamples]:
    """One entry for each micro-batch that was lost."""
    parts = parts_of(step, context.data.recent, context.config.id_key) or [BatchPart()]
    guilty = _guilty(incident, len(parts))
    shared = _shared_fields(context, parts, incident)
    origin = incident.origin
    # samples of this rank that were lost because of another rank's are innocent
    elsewhere = origin is not None and origin.rank not in (None, context.agreement.rank)
    found: list[BadSamples] = []
    for number, part in enumerate(parts):
        if number not in guilty and shared["left_out"] != "step":
            continue
        innocent = elsewhere or number not in guilty
        samples = () if innocent else _guilty_samples(origin, number)
        micro = number if len(parts) > 1 else None
        count = part.size or 0
        if shared["left_out"] == "sample":
            count = len(samples)
        epoch, batch = part.place or (None, None)
        found.append(
            BadSamples(
                **shared,
                micro_batch=micro,
                samples=samples,
                count=count,
                indices=part.indices_of(samples),
                ids=part.ids_of(samples),
                epoch=epoch,
                batch=batch,
                innocent=innocent,
            )
        )
    return found


def _guilty_samples(origin: Origin | None, number: int) -> tuple[int, ...]:
    if origin is None or number != (origin.micro_batch or 0):
        return ()
    return origin.samples


def _shared_fields(context: Context, parts: list[BatchPart], incident: Incident) -> dict[str, Any]:
    """What the entries of one step have in common."""
    known = [part.size for part in parts if part.size is not None]
    return {
        "step": incident.step,
        "run": context.run.id,
        "attempt": context.run.attempt,
        "rank": context.agreement.rank,
        "time": time.time(),
        "of": sum(known) if len(known) == len(parts) else 0,
        "left_out": _extent(incident),
        "cause": incident.findings[0].code if incident.findings else incident.verdict.kind,
        "place": _place(incident),
        "incident": incident.id,
    }


def _guilty(incident: Incident, count: int) -> set[int]:
    """Micro-batches that caused it; all of them where it is not known which."""
    if incident.decision is not None:
        dropped = set(incident.decision.dropped_micro_batches)
        if dropped:
            return dropped
    if incident.origin is not None and incident.origin.micro_batch is not None:
        return {incident.origin.micro_batch}
    return set(incident.reading.bad_micro_batches) or set(range(count))


def _extent(incident: Incident) -> Extent:
    decision = incident.decision
    if decision is None or decision.action != "leave_out":
        return "step"
    return "micro_batch" if decision.dropped_micro_batches else "sample"


def _place(incident: Incident) -> str:
    origin = incident.origin
    if origin is None:
        return incident.verdict.summary
    return place_and_phase(origin)

"""What of a bad step is proven guilty, and the rest of the step: rows or micro-batches that can be
trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepguard.engine.recover import leave_out
from stepguard.locate.batch import sample_count
from stepguard.records import Incident
from stepguard.state.replay import rerun
from stepguard.state.step import Step


def proven_guilty(step: Step, incident: Incident) -> str:
    """What the step could go on without, in words (people count micro-batches from 1); empty where
    it is all of it.
    """
    reading = incident.reading
    if reading.bad_state or reading.overflow:
        return ""
    rows = _sample_words(step, incident)
    if rows:
        return rows
    count = len(step.micro_batches)
    guilty = reading.bad_micro_batches
    if count == 1 or len(guilty) == count:
        return ""
    return micro_batch_words(guilty, count) if guilty else "a micro-batch"


def _sample_words(step: Step, incident: Incident) -> str:
    origin = incident.origin
    if origin is None or not origin.samples:
        return ""
    micro = origin.micro_batch or 0
    if not _can_go(step.micro_batches[micro], origin.samples):
        return ""
    plural = "s" if len(origin.samples) > 1 else ""
    rows = ", ".join(map(str, origin.samples))
    count = len(step.micro_batches)
    where = f" of micro-batch {micro + 1} of {count}" if count > 1 else ""
    return f"sample{plural} {rows}{where}"


def micro_batch_words(guilty: Sequence[int], count: int) -> str:
    """`micro-batch 2 of 4`, counted from 1."""
    numbers = ", ".join(str(index + 1) for index in guilty)
    return f"micro-batch{'es' if len(guilty) > 1 else ''} {numbers} of {count}"


def share_of(step: Step, incident: Incident) -> float:
    """Share of the step's samples that is lost without what is proven guilty."""
    origin = incident.origin
    counts = [max(sample_count(batch), 1) for batch in step.micro_batches]
    if (
        origin is not None
        and origin.samples
        and _can_go(step.micro_batches[origin.micro_batch or 0], origin.samples)
    ):
        return len(origin.samples) / sum(counts)
    guilty = incident.reading.bad_micro_batches or (0,)
    return sum(counts[index] for index in guilty) / sum(counts)


def without_samples(step: Step, incident: Incident) -> Step | None:
    """The step without its guilty rows, if it is finite then; None where it is not or cannot be
    cut.
    """
    origin = incident.origin
    if origin is None or not origin.samples:
        return None
    micro = origin.micro_batch or 0
    batches: list[Any] = list(step.micro_batches)
    batches[micro] = leave_out.without_samples(batches[micro], origin.samples)
    if batches[micro] is None:
        return None
    rest = replace(step, micro_batches=tuple(batches))
    return rest if _finite(rest, range(len(batches))) else None


def _can_go(batch: Any, samples: Sequence[int]) -> bool:
    """Is something left without these samples, and can the batch be cut safely?"""
    count = leave_out.samples_in(batch)
    return count is not None and len(samples) < count


def good_micro_batches(step: Step) -> list[int]:
    """Those that are finite on their own."""
    return [index for index in range(len(step.micro_batches)) if _finite(step, [index])]


def _finite(step: Step, micro: Sequence[int]) -> bool:
    try:
        again = rerun(step, micro=micro)
    except Exception:  # the user's code cannot take such a batch
        return False
    return again.grads_finite and all(loss - loss == 0.0 for loss in again.losses)

"""Leave out what is proven guilty: a bad step without its bad rows or micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepguard.locate.batch import sample_count
from stepguard.records import Incident, Origin
from stepguard.state.batch_rows import batch_without, samples_in
from stepguard.state.replay import rerun
from stepguard.state.step import Step


def proven_guilty(step: Step, incident: Incident) -> str:
    """What the step could go on without, in words; empty where it is all of it."""
    reading = incident.reading
    if reading.bad_state or reading.overflow:
        return ""
    samples = _sample_words(step, incident)
    if samples:
        return samples
    count = len(step.micro_batches)
    guilty = reading.bad_micro_batches
    if count == 1 or len(guilty) == count:
        return ""
    if not guilty:
        return "a micro-batch"
    return micro_batch_words(guilty, count)


def _sample_words(step: Step, incident: Incident) -> str:
    origin = incident.origin
    if origin is None or not _can_lose(step, origin):
        return ""
    said = "samples " if len(origin.samples) > 1 else "sample "
    said += ", ".join(map(str, origin.samples))
    count = len(step.micro_batches)
    if count > 1:
        said += f" of micro-batch {(origin.micro_batch or 0) + 1} of {count}"
    return said


def micro_batch_words(guilty: Sequence[int], count: int) -> str:
    """`micro-batch 2 of 4`, counted from 1 as people do."""
    said = "micro-batches " if len(guilty) > 1 else "micro-batch "
    said += ", ".join(str(index + 1) for index in guilty)
    return f"{said} of {count}"


def share_of(step: Step, incident: Incident) -> float:
    """Share of the step's samples that is lost without what is proven guilty."""
    counts = [max(sample_count(batch), 1) for batch in step.micro_batches]
    origin = incident.origin
    if origin is not None and _can_lose(step, origin):
        return len(origin.samples) / sum(counts)
    guilty = incident.reading.bad_micro_batches or (0,)
    return sum(counts[index] for index in guilty) / sum(counts)


def without_samples(step: Step, incident: Incident) -> Step | None:
    """The step without its guilty rows; None where it is not finite then or cannot be cut."""
    origin = incident.origin
    if origin is None or not origin.samples:
        return None
    micro = origin.micro_batch or 0
    batches: list[Any] = list(step.micro_batches)
    batches[micro] = batch_without(batches[micro], origin.samples)
    if batches[micro] is None:
        return None
    rest = replace(step, micro_batches=tuple(batches))
    if not _finite(rest, range(len(batches))):
        return None
    return rest


def good_micro_batches(step: Step) -> list[int]:
    """Those that are finite on their own."""
    return [index for index in range(len(step.micro_batches)) if _finite(step, [index])]


def _can_lose(step: Step, origin: Origin) -> bool:
    """Are samples proven guilty, can their batch be cut, and is something left of it?"""
    if not origin.samples:
        return False
    count = samples_in(step.micro_batches[origin.micro_batch or 0])
    return count is not None and len(origin.samples) < count


def _finite(step: Step, micro: Sequence[int]) -> bool:
    try:
        again = rerun(step, micro=micro)
    except Exception:
        # the user's code cannot take such a batch
        return False
    return again.grads_finite and all(map(math.isfinite, again.losses))

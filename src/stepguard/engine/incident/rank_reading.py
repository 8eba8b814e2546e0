"""Agree on one reading among ranks: the one of the rank that is to blame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import examine
from stepguard.records import Origin, Reading
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.state.replay import gradients_came_back_finite, model_finite, rerun
from stepguard.state.step import Step

EXCHANGED = 1
"""The gradients are bad, and may be another rank's."""
HERE = 2
"""The loss is bad, or a replay on this rank alone is."""
HELD = 3
"""A stored tensor or an input is bad. A loss can be bad by what a pipeline or a gather brought."""

NO_RANK = (
    "the rank it came from is not known: no rank shows it again by itself, and the gradients were "
    "already exchanged"
)


def agreed_reading(context: Context, step: Step, reading: Reading) -> Reading:
    """Every rank takes its closer look, and all go on with the reading of the worst one."""

    def look() -> dict[str, Any]:
        own = examine(context, step, reading)
        return {"trouble": own_trouble(step, own), "reading": to_jsonable(own)}

    told_by_rank = context.agreement.together(look, "the reading")
    troubles = [told["trouble"] for told in told_by_rank]
    bad = blamed_ranks(troubles, sharded=context.sharded)
    leader = bad[0] if bad else 0
    agreed = from_jsonable(Reading, told_by_rank[leader]["reading"])
    return replace(agreed, bad_ranks=tuple(context.agreement.members[place] for place in bad))


def blamed_ranks(troubles: Sequence[int], *, sharded: bool = False) -> list[int]:
    """The ranks that made the bad value, the surest first; empty where that is not known.

    `sharded`: a bad shard spoils the loss of every rank that gathers it, so only the surest count.
    """
    worst = max(troubles)
    if worst == EXCHANGED and min(troubles) == worst:
        # averaged gradients are the same everywhere, and tell of no rank
        return []
    least = min(worst, HERE)
    if sharded:
        least = worst
    least = max(least, EXCHANGED)
    bad = [rank for rank, trouble in enumerate(troubles) if trouble >= least]
    return sorted(bad, key=lambda rank: -troubles[rank])


def own_trouble(step: Step, reading: Reading) -> int:
    """How surely this rank made the bad value: in what it holds, by itself, by exchange, not."""
    if reading.missed:
        return HELD
    if reading.bad_inputs or (reading.bad_state and not reading.state_born):
        # a bad shard spoils the loss of every rank that gathers it, so it outranks a bad loss
        return HELD
    if _made_here(reading):
        return HERE
    if reading.grads_finite or reading.overflow:
        return 0
    clean = _finite_alone(step)
    if clean is None:
        return EXCHANGED
    return 0 if clean else HERE


def _finite_alone(step: Step) -> bool | None:
    """Are this rank's own gradients finite? None if no replay can tell.

    DDP has averaged the gradients already, so only a replay tells whose they were.
    """
    if step.replayable:
        return rerun(step).grads_finite
    if step.model_only:
        return gradients_came_back_finite(step) and model_finite(step)
    return None


def with_rank(origin: Origin, reading: Reading) -> Origin:
    """Name the rank of an origin; where no rank is known, say so."""
    if reading.bad_ranks:
        return replace(origin, rank=reading.bad_ranks[0])
    return replace(origin, rank=None, remarks=(*origin.remarks, NO_RANK))


def _made_here(reading: Reading) -> bool:
    if reading.bad_micro_batches or reading.bad_state:
        return True
    return not all(map(math.isfinite, reading.lr))

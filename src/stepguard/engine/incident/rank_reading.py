"""Agree on one reading among ranks: the one of the rank that is to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import examine
from stepguard.engine.incident.presumed_verdict import presumed_reading
from stepguard.engine.protect import in_words, warn_not_explained
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

MOST_NAMES = 16
"""Names of tensors of one kind that ranks tell each other."""
MOST_SAID = 200
"""Characters of an error that ranks tell each other."""

NO_RANK = (
    "the rank it came from is not known: no rank shows it again by itself, and the gradients were "
    "already exchanged"
)


def agreed_reading(
    context: Context, step: Step, reading: Reading, tell: Callable[[str], None]
) -> Reading:
    """Every rank takes its closer look, and all go on with the reading of the worst one.

    Each tells one number; only the worst one tells more. A rank whose look fails is judged by what
    its numbers prove, and `tell` gets a sentence.
    """
    agreement = context.agreement
    own = presumed_reading(context, reading)

    def look() -> dict[str, Any]:
        nonlocal own
        try:
            own = examine(context, step, reading)
            return {"trouble": own_trouble(step, own), "fault": ""}
        except Exception as fault:
            return {"trouble": _presumed_trouble(own), "fault": in_words(fault)[:MOST_SAID]}

    told_by_rank = agreement.together(look, "the reading")
    for rank, told in zip(agreement.members, told_by_rank, strict=True):
        if told["fault"]:
            warn_not_explained(tell, f"rank {rank}: {told['fault']}")
    troubles = [told["trouble"] for told in told_by_rank]
    bad = blamed_ranks(troubles, sharded=context.sharded)
    leader = agreement.members[bad[0] if bad else 0]
    worst = agreement.from_rank(leader, lambda: to_jsonable(_shortened(own)))
    agreed = from_jsonable(Reading, worst)
    return replace(agreed, bad_ranks=tuple(agreement.members[place] for place in bad))


def _shortened(reading: Reading) -> Reading:
    """With as many names as anybody reads: what ranks exchange is not to grow with the model."""
    return replace(
        reading,
        bad_state=reading.bad_state[:MOST_NAMES],
        bad_inputs=reading.bad_inputs[:MOST_NAMES],
        bad_grads=reading.bad_grads[:MOST_NAMES],
        unnamed_grads=len(reading.bad_grads[MOST_NAMES:]),
    )


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


def _presumed_trouble(reading: Reading) -> int:
    """`own_trouble` without running anything."""
    if reading.bad_state:
        return HELD
    if _made_here(reading):
        return HERE
    return 0 if reading.grads_finite else EXCHANGED


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

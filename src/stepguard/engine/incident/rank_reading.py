"""Agree on one reading among ranks: the one of the rank that is to blame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import examine
from stepguard.engine.incident.joint_replay import agree_on_holders, gathered_on
from stepguard.records import Origin, Reading
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.state.faked_collectives import CollectiveInReplayError
from stepguard.state.gathered_model import spreads_in_forward
from stepguard.state.replay import gradients_came_back_finite, model_finite, rerun
from stepguard.state.step import Step

EXCHANGED = 1
"""The gradients are bad, and may be another rank's."""
HERE = 2
"""The loss is bad, or a replay on this rank alone is."""
GIVEN = 3
"""An input is bad. A loss can be bad by what a pipeline or a gather brought."""
HELD = 4
"""A stored tensor is bad."""

NO_RANK = (
    "the rank it came from is not known: no rank shows it again by itself, and the gradients were "
    "already exchanged"
)


def agreed_reading(context: Context, step: Step, reading: Reading) -> Reading:
    """Every rank takes its closer look, and all go on with the reading of the worst one."""

    def look() -> dict[str, Any]:
        try:
            own = examine(context, step, reading)
            trouble = own_trouble(step, own)
        except CollectiveInReplayError:
            # its tokens go to experts on other ranks, say: no rank can run it again by itself
            step.sharded = True
            own = examine(context, step, reading)
            trouble = own_trouble(step, own)
        context.own_reading = own
        return {"trouble": trouble, "reading": to_jsonable(own), "needs_others": step.sharded}

    told_by_rank = context.agreement.in_step(look, "the reading")
    # all or none: what is decided must not depend on who tried a replay
    step.sharded = any(told["needs_others"] for told in told_by_rank)
    troubles = [told["trouble"] for told in told_by_rank]
    if context.sharded and max(troubles) == EXCHANGED:
        troubles = _troubles_before_exchange(context, step) or troubles
    spreads = context.sharded and spreads_in_forward(context.roots.values())
    bad = blamed_ranks(troubles, sharded=context.sharded, spreads=spreads)
    leader = bad[0] if bad else 0
    agreed = from_jsonable(Reading, told_by_rank[leader]["reading"])
    if context.sharded:
        readings = [from_jsonable(Reading, told["reading"]) for told in told_by_rank]
        agreed = _with_bad_parts(agreed, readings)
    return replace(agreed, bad_ranks=tuple(context.agreement.deciding[place] for place in bad))


def _with_bad_parts(agreed: Reading, readings: Sequence[Reading]) -> Reading:
    """Add what others have seen in their parts of the gradients.

    The rank that made a bad gradient may hold a part of it in which all is finite.
    """
    bad = [reading for reading in readings if not reading.grads_finite and not reading.overflow]
    if not agreed.grads_finite or not bad:
        return agreed
    names: dict[str, None] = {}
    for reading in bad:
        names.update(dict.fromkeys(reading.bad_grads))
    return replace(agreed, grads_finite=False, grad_norm=bad[0].grad_norm, bad_grads=tuple(names))


def _troubles_before_exchange(context: Context, step: Step) -> list[int]:
    """Whose own gradients were bad: all ranks gather the model, then each runs the step alone.

    Empty where not all of them can hold it.
    """
    agreement = context.agreement
    holders = agree_on_holders(context, step, agreement.members)
    if len(holders) < agreement.size:
        return []

    def look() -> dict[str, Any]:
        with gathered_on(context, step, holders):
            clean = _finite_alone(step)
        if clean is None:
            return {"trouble": EXCHANGED}
        return {"trouble": 0 if clean else HERE}

    return [told["trouble"] for told in agreement.together(look, "the gradients of each rank")]


def blamed_ranks(
    troubles: Sequence[int], *, sharded: bool = False, spreads: bool = False
) -> list[int]:
    """The ranks that made the bad value, the surest first; empty where that is not known.

    `sharded`: a bad shard spoils the loss of every rank that gathers it, so only the surest count.
    `spreads`: so does a bad input, where ranks compute one batch together.
    """
    worst = max(troubles)
    if worst == EXCHANGED and (sharded or min(troubles) == worst):
        # averaged gradients are the same everywhere, and tell of no rank; of a sharded gradient the
        # rank whose part is bad need not be the one that made it so
        return []
    least = min(worst, HERE)
    if sharded and (worst == HELD or spreads):
        least = worst
    least = max(least, EXCHANGED)
    bad = [rank for rank, trouble in enumerate(troubles) if trouble >= least]
    return sorted(bad, key=lambda rank: -troubles[rank])


def own_trouble(step: Step, reading: Reading) -> int:
    """How surely this rank made the bad value: in what it holds, by itself, by exchange, not."""
    if reading.bad_state and not reading.state_born:
        # a bad shard spoils the loss of every rank that gathers it, so it outranks a bad loss
        return HELD
    if reading.bad_inputs:
        return GIVEN
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


def with_rank(origin: Origin, rank: int | None) -> Origin:
    """Name the rank of an origin; where no rank is known, say so."""
    if rank is not None:
        return replace(origin, rank=rank)
    return replace(origin, rank=None, remarks=(*origin.remarks, NO_RANK))


def _made_here(reading: Reading) -> bool:
    if reading.bad_micro_batches or reading.bad_state:
        return True
    return not all(map(math.isfinite, reading.lr))

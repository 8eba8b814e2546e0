"""Agree on one reading among ranks: the one of the rank that is to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import examine
from stepguard.engine.incident.joint_replay import agree_on_holders, gathered_on
from stepguard.engine.incident.presumed_verdict import presumed_reading
from stepguard.engine.protect import in_words, warn_not_explained
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
        fault = ""
        try:
            own, trouble = _closer_look(context, step, reading)
        except Exception as error:
            trouble = _presumed_trouble(own)
            fault = in_words(error)[:MOST_SAID]
        context.own_reading = own
        part = _own_part(own) if context.sharded else {}
        return {"trouble": trouble, "fault": fault, "needs_others": step.sharded, "part": part}

    told_by_rank = agreement.in_step(look, "the reading")
    for rank, told in zip(agreement.deciding, told_by_rank, strict=True):
        if told["fault"]:
            warn_not_explained(tell, f"rank {rank}: {told['fault']}")
    # all or none: what is decided must not depend on who tried a replay
    step.sharded = any(told["needs_others"] for told in told_by_rank)
    bad = _to_blame(context, step, [told["trouble"] for told in told_by_rank])
    leader = agreement.deciding[bad[0] if bad else 0]
    worst = agreement.from_rank(leader, lambda: to_jsonable(_shortened(own)))
    agreed = from_jsonable(Reading, worst)
    if context.sharded:
        agreed = _with_bad_parts(agreed, [told["part"] for told in told_by_rank])
    return replace(agreed, bad_ranks=tuple(agreement.deciding[place] for place in bad))


def _to_blame(context: Context, step: Step, troubles: list[int]) -> list[int]:
    """Places of the ranks that made the bad value, the surest first."""
    if context.sharded and max(troubles) == EXCHANGED:
        troubles = _troubles_before_exchange(context, step) or troubles
    spreads = context.sharded and spreads_in_forward(context.roots.values())
    return blamed_ranks(troubles, sharded=context.sharded, spreads=spreads)


def _own_part(reading: Reading) -> dict[str, Any]:
    """What this rank has seen in its part of the gradients, where that is bad."""
    if reading.grads_finite or reading.overflow:
        return {}
    short = _shortened(reading)
    # as text: strict JSON has no NaN
    return {"norm": str(reading.grad_norm), "names": list(short.bad_grads)}


def _shortened(reading: Reading) -> Reading:
    """With as many names as anybody reads: what ranks exchange is not to grow with the model."""
    return replace(
        reading,
        bad_state=reading.bad_state[:MOST_NAMES],
        bad_inputs=reading.bad_inputs[:MOST_NAMES],
        bad_grads=reading.bad_grads[:MOST_NAMES],
        unnamed_grads=len(reading.bad_grads[MOST_NAMES:]),
    )


def _closer_look(context: Context, step: Step, reading: Reading) -> tuple[Reading, int]:
    try:
        own = examine(context, step, reading)
        return own, own_trouble(step, own)
    except CollectiveInReplayError:
        # its tokens go to experts on other ranks, say: no rank can run it again by itself
        step.sharded = True
        own = examine(context, step, reading)
        return own, own_trouble(step, own)


def _with_bad_parts(agreed: Reading, parts: Sequence[dict[str, Any]]) -> Reading:
    """Add what others have seen in their parts of the gradients.

    The rank that made a bad gradient may hold a part of it in which all is finite.
    """
    bad = [part for part in parts if part]
    if not agreed.grads_finite or not bad:
        return agreed
    names: dict[str, None] = {}
    for part in bad:
        names.update(dict.fromkeys(part["names"]))
    norm = None if bad[0]["norm"] == "None" else float(bad[0]["norm"])
    return replace(agreed, grads_finite=False, grad_norm=norm, bad_grads=tuple(names))


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
    if reading.missed:
        return HELD
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


def with_rank(origin: Origin, rank: int | None) -> Origin:
    """Name the rank of an origin; where no rank is known, say so."""
    if rank is not None:
        return replace(origin, rank=rank)
    return replace(origin, rank=None, remarks=(*origin.remarks, NO_RANK))


def _made_here(reading: Reading) -> bool:
    if reading.bad_micro_batches or reading.bad_state:
        return True
    return not all(map(math.isfinite, reading.lr))

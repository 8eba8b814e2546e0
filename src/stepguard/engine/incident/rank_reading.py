"""Agree on one reading among ranks: the one of the rank that is to blame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import examine
from stepguard.records import Reading
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.state.replay import gradients_came_back_finite, model_finite, rerun
from stepguard.state.step import Step


def agreed_reading(context: Context, step: Step, reading: Reading) -> Reading:
    """Every rank takes its closer look, and all go on with the reading of the worst one."""

    def look() -> dict[str, Any]:
        own = examine(context, step, reading)
        return {"trouble": own_trouble(step, own), "reading": to_jsonable(own)}

    told_by_rank = context.agreement.together(look)
    worst = max(told["trouble"] for told in told_by_rank)
    bad: list[int] = []
    if worst > 0:
        bad = [rank for rank, told in enumerate(told_by_rank) if told["trouble"] == worst]
    leader = bad[0] if bad else 0
    agreed = from_jsonable(Reading, told_by_rank[leader]["reading"])
    return replace(agreed, bad_ranks=tuple(bad))


def own_trouble(step: Step, reading: Reading) -> int:
    """How surely this rank made the bad value: 3 stored, 2 by itself, 1 by exchange, 0 not."""
    if reading.bad_state and not reading.state_born:
        # a bad shard spoils the loss of every rank that gathers it, so it outranks a bad loss
        return 3
    if reading.bad_micro_batches or reading.bad_state or reading.bad_inputs:
        return 2
    if reading.grads_finite or reading.overflow:
        return 0
    clean = _finite_alone(step)
    if clean is None:
        return 1
    return 0 if clean else 2


def _finite_alone(step: Step) -> bool | None:
    """Are this rank's own gradients finite? None if no replay can tell.

    DDP has averaged the gradients already, so only a replay tells whose they were.
    """
    if step.replayable:
        return rerun(step).grads_finite
    if step.model_only:
        return gradients_came_back_finite(step) and model_finite(step)
    return None

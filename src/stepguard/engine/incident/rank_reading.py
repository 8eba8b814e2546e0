"""Agree on one reading among ranks: the one of the rank that is to blame."""

from __future__ import annotations

import math
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

    told_by_rank = context.agreement.together(look, "the reading")
    worst = max(told["trouble"] for told in told_by_rank)
    bad: list[int] = []
    if worst > 0:
        bad = [place for place, told in enumerate(told_by_rank) if told["trouble"] == worst]
    leader = bad[0] if bad else 0
    agreed = from_jsonable(Reading, told_by_rank[leader]["reading"])
    return replace(agreed, bad_ranks=tuple(context.agreement.members[place] for place in bad))


def own_trouble(step: Step, reading: Reading) -> int:
    """How surely this rank made the bad value: 2 by itself, 1 by exchanged gradients, 0 not."""
    if _trouble_of_its_own(reading):
        return 2
    if reading.grads_finite or reading.overflow:
        return 0
    # DDP has averaged the gradients already, so only a replay tells whose they were
    if step.replayable:
        clean = rerun(step).grads_finite
    elif step.model_only:
        clean = gradients_came_back_finite(step) and model_finite(step)
    else:
        return 1
    return 0 if clean else 2


def _trouble_of_its_own(reading: Reading) -> bool:
    if reading.bad_micro_batches or reading.bad_state or reading.bad_inputs:
        return True
    return not all(map(math.isfinite, reading.lr))

"""Replay a step of a sharded model: all ranks gather its parameters by one plan, or none does.

The ranks agree first on who may hold all of them. Then all enter the gathering together, and those
that hold everything replay alone, as with a model that is not sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stepguard.engine.context import Context
from stepguard.state.gathered_model import gathered, has_room, why_not_gathered
from stepguard.state.step import Step

NO_ROOM = "there is no room for all parameters and their gradients on the rank that failed"


def agree_on_holders(context: Context, step: Step, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return which of these ranks are to hold all parameters; the same on every rank.

    None where the model is not sharded, cannot be gathered, or where nobody has room for it.
    """
    if not context.sharded:
        return ()
    roots = step.named_roots().values()

    def look() -> dict[str, Any]:
        return {"why": why_not_gathered(roots), "room": has_room(roots)}

    told = context.agreement.together(look, "the plan of a replay")
    for facts in told:
        if facts["why"]:
            step.not_gathered = facts["why"]
            return ()
    places = {rank: place for place, rank in enumerate(context.agreement.members)}
    holders = tuple(rank for rank in wanted if told[places[rank]]["room"])
    if not holders:
        step.not_gathered = NO_ROOM
    return holders


@contextmanager
def gathered_on(context: Context, step: Step, holders: Sequence[int]) -> Iterator[None]:
    """Enter on all ranks at once, as agreed: inside, the holders can run the step alone."""
    if not holders:
        yield
        return
    with gathered(step, hold=context.agreement.world_rank in holders):
        yield

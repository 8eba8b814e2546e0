"""Find the origin of a bad step with several ranks: each that is to blame looks, then all know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.joint_replay import agree_on_holders, gathered_on
from stepguard.engine.incident.rank_reading import with_rank
from stepguard.locate.find_origin import finite_step
from stepguard.records import Origin, Reading
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.sentinel.rank_agreement import RankAbsent, RankFault
from stepguard.state.faked_collectives import CollectiveInReplayError
from stepguard.state.step import Step

MOST_FINDERS = 8
"""Ranks that look for a cause of their own; more of them say something about all."""

Find = Callable[[Step, Reading], Origin]


def find_together(
    context: Context,
    find: Find,
    step: Step,
    reading: Reading,
    not_explained: Callable[[str], None],
) -> Origin | None:
    """Return the origin on the first rank to blame; what others found is told in its remarks.

    A rank replays alone, which holds no collective. A fault in it costs the origin on all ranks.
    """
    agreement = context.agreement
    if agreement.size == 1:
        return find(step, reading)
    if agreement.apart and not reading.bad_ranks:
        # another rank's doing, and that one tells of it: nothing would be found here
        return None
    finders = reading.bad_ranks[:MOST_FINDERS] or agreement.deciding[:1]
    rank = agreement.world_rank

    def look() -> dict[str, Any]:
        # first of all, before anything can fail: the other ranks are entering it too
        with gathered_on(context, step, holders):
            if rank not in finders:
                return {}
            known = rank if reading.bad_ranks else None
            own = _own_reading(context, reading, leads=rank == finders[0])
            return to_jsonable(with_rank(_found(find, step, own), known))

    try:
        holders: tuple[int, ...] = ()
        if _asks_for_replay(reading) and not agreement.apart:
            holders = agree_on_holders(context, step, finders)
        told = agreement.in_step(look, "the origin")
    except RankAbsent:
        raise
    except RankFault as fault:
        # told to all ranks alike
        not_explained(f"a bad step is not located: {fault}")
        return None
    places = [agreement.deciding.index(finder) for finder in finders]
    found = [from_jsonable(Origin, told[place]) for place in places if told[place]]
    if not found:
        return None
    return _with_others(found[0], found[1:])


def _found(find: Find, step: Step, reading: Reading) -> Origin:
    """Find the origin; without a replay where that would need the other ranks."""
    try:
        return find(step, reading)
    except CollectiveInReplayError:
        return find(replace(step, sharded=True), reading)


def _asks_for_replay(reading: Reading) -> bool:
    """Can running the model again tell something? Not of what an optimizer made or keeps."""
    if reading.state_born:
        return reading.bad_state[0].startswith("buffer:")
    if not finite_step(reading):
        return True
    return bool(reading.bad_state) and not reading.bad_state[0].startswith("opt:")


def _own_reading(context: Context, agreed: Reading, *, leads: bool) -> Reading:
    """The reading of the first rank to blame is the agreed one; another has seen its own."""
    own = context.own_reading
    if leads or own is None or own.step != agreed.step:
        return agreed
    # of a sharded gradient this rank's part may be finite though it made the bad one
    finite = own.grads_finite and agreed.grads_finite
    return replace(own, bad_ranks=agreed.bad_ranks, grads_finite=finite)


def _with_others(origin: Origin, others: list[Origin]) -> Origin:
    words = tuple(_in_words(other) for other in others)
    return replace(origin, remarks=(*origin.remarks, *words))


def _in_words(origin: Origin) -> str:
    """`rank 1 as well: batch:x, sample 2`."""
    what = origin.tensor or origin.op or origin.phase
    said = f"rank {origin.rank} as well: {what}"
    if origin.module:
        said += f" in {origin.module}"
    if origin.samples:
        count = "samples" if len(origin.samples) > 1 else "sample"
        said += f", {count} {', '.join(map(str, origin.samples))}"
    return said

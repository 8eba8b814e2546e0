"""One reading and one origin of a bad step on every rank: those of the rank that is to blame.

An incident costs two exchanges. In the first each rank sends what it has read; in the second the
ranks to blame report where it originated, and all of them where they could go back to, if that may
be needed; then the first rank decides for all (engine/incident).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from stepguard.locate.find_origin import finite_step
from stepguard.ranks.agreement import Agreement, RankAbsent
from stepguard.records import Origin, Reading
from stepguard.state.batch import Step
from stepguard.state.isolation import gradients_came_back_finite, model_finite, rerun
from stepguard.state.sharded import (
    CollectiveInReplayError,
    gathered,
    has_room,
    spreads_in_forward,
    why_not_gathered,
)

EXCHANGED = 1
"""The gradients are bad, and may be another rank's."""
HERE = 2
"""The loss is bad, or a replay on this rank is."""
GIVEN = 3
"""An input is bad. A loss can be bad by what a pipeline or a gather brought."""
HELD = 4
"""A stored tensor is bad."""

MOST_NAMES = 16
"""Names of tensors of one kind that ranks send each other."""
MOST_SAID = 200
"""Characters of an error that ranks send each other."""
MOST_FINDERS = 8
"""Ranks that look for a cause of their own; more of them say something about all."""
MOST_NAMED = 8
WAIT = 1.0
"""Seconds that a rank waits for others to find the same. They wait for it in the next step."""
WAIT_GRADIENT = 10.0
"""Bad gradients are almost always everybody's: a rank that is late is not to be taken for gone."""
NO_ROOM = "the rank that failed does not have enough memory for all parameters and their gradients"
NO_RANK = (
    "the rank it came from is not known: no rank reproduces it locally, and the gradients "
    "were already exchanged"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """What one rank reports of a bad step before anything is located."""

    reading: Reading
    trouble: int
    fault: str = ""
    """Why its closer look failed, in words."""
    needs_others: bool = False
    """The step cannot be run again by one rank."""
    damaged: tuple[str, ...] = ()
    """Stored tensors of this rank that are non-finite and that a peer may hold."""
    not_gathered: str = ""
    """Why no rank can hold all of a sharded model."""
    has_room: bool = True


class OneDecision:
    """What the ranks of one guard have reported of the bad step at hand."""

    def __init__(self, agreement: Agreement, shards: Sequence[nn.Module]) -> None:
        """`shards`: the modules of which no rank holds all parameters; empty if each does."""
        self.agreement = agreement
        self._shards = shards
        self._told: list[RankReading] = []

    # --- the reading

    def others_come(self, reading: Reading, missed: str) -> bool:
        """Do the others deal with this step, too? Gradients that were exchanged cannot tell them.

        `missed`: what this rank alone had refused before, which they have heard of since.
        """
        agreement = self.agreement
        if agreement.mode != "spread":
            return True
        # gradients that were bad before the exchange have told the others, who come at once
        seconds = WAIT if reading.grads_finite else WAIT_GRADIENT
        if agreement.all_here("what was found after the exchange", seconds):
            return True
        if reading.grads_finite:
            return False
        if missed:
            # the gradients carried it; waiting for the ranks again would hold up the run
            others = [str(r) for r in agreement.members if r != agreement.world_rank]
            raise RankAbsent(
                f"rank {' or '.join(others[:MOST_NAMED])} did not join a step that rank"
                f" {agreement.world_rank} found bad locally: does it have a guard?"
            )
        # one that has disarmed keeps away from this step's update, too
        return agreement.somebody_left

    def reading(
        self,
        step: Step,
        presumed: Reading,
        examine: Callable[[], Reading],
        damaged: Callable[[], list[str]],
    ) -> tuple[Reading, list[str]]:
        """Every rank takes its closer look, and all go on with the reading of the worst one.

        A rank whose look fails is judged by what its numbers prove; returned is what failed.
        """

        def look() -> dict[str, RankReading]:
            fault = ""
            try:
                own, trouble = _closer_look(step, examine)
            except Exception as error:
                own = presumed
                trouble = _proven_trouble(own)
                fault = f"{type(error).__name__}: {error}"[:MOST_SAID]
            bad: tuple[str, ...] = ()
            if own.bad_state and not own.state_born:
                bad = tuple(damaged())
            record = RankReading(
                reading=_shortened(own),
                trouble=trouble,
                fault=fault,
                needs_others=step.sharded,
                damaged=bad,
            )
            if self._shards:
                room = has_room(self._shards)
                why = why_not_gathered(self._shards)
                record = replace(record, not_gathered=why, has_room=room)
            return {"read": record}

        self._told = [told["read"] for told in self.agreement.together(look, "the reading")]
        # all or none: what is decided must not depend on who tried a replay
        step.sharded = any(told.needs_others for told in self._told)
        troubles = [told.trouble for told in self._told]
        if self._shards and max(troubles) == EXCHANGED:
            troubles = self._troubles_before_exchange(step) or troubles
        spreads = spreads_in_forward(self._shards)
        bad = blamed_ranks(troubles, sharded=bool(self._shards), spreads=spreads)
        agreed = self._told[bad[0] if bad else 0].reading
        if self._shards:
            agreed = _with_bad_parts(agreed, [told.reading for told in self._told])
        members = self.agreement.members
        faults = []
        for rank, told in zip(members, self._told, strict=True):
            if told.fault:
                faults.append(f"rank {rank}: {told.fault}")
        return replace(agreed, bad_ranks=tuple(members[place] for place in bad)), faults

    def damaged(self) -> set[str]:
        """Names of all tensors that are damaged on any rank."""
        return {name for told in self._told for name in told.damaged}

    def _troubles_before_exchange(self, step: Step) -> list[int]:
        """Whose own gradients were bad: all ranks gather the model, then each runs the step.

        Empty where not all of them can hold it.
        """
        holders = self._holders(step, self.agreement.members)
        if len(holders) < self.agreement.size:
            return []

        def look() -> dict[str, int]:
            with self._gathered(step, holders):
                return {"trouble": _gradient_trouble(step)}

        told = self.agreement.together(look, "the gradients of each rank")
        return [facts["trouble"] for facts in told]

    # --- the origin

    def find(
        self, step: Step, reading: Reading, find: Callable[[Step, Reading], Origin]
    ) -> Origin | None:
        """Return what this rank finds; None where it is not to blame. All ranks call."""
        rank = self.agreement.world_rank
        finders = self._finders(reading)
        holders = self._holders(step, finders) if _asks_for_replay(reading) else ()
        # first of all, before anything can fail: the other ranks are entering it too
        with self._gathered(step, holders):
            if rank not in finders:
                return None
            own = reading
            if rank != finders[0]:
                own = self._own_reading(reading)
            try:
                origin = find(step, own)
            except CollectiveInReplayError:
                origin = find(replace(step, sharded=True), own)
        if reading.bad_ranks:
            return replace(origin, rank=rank)
        return replace(origin, rank=None, remarks=(*origin.remarks, NO_RANK))

    def first_origin(self, reading: Reading, found: Sequence[Origin | None]) -> Origin | None:
        """What the first rank to blame has found, with what the others say in its remarks."""
        known: list[Origin] = []
        for finder in self._finders(reading):
            origin = found[self.agreement.members.index(finder)]
            if origin is not None:
                known.append(origin)
        if not known:
            return None
        words = tuple(map(_in_words, known[1:]))
        return replace(known[0], remarks=(*known[0].remarks, *words))

    def _finders(self, reading: Reading) -> tuple[int, ...]:
        return reading.bad_ranks[:MOST_FINDERS] or self.agreement.members[:1]

    def _own_reading(self, agreed: Reading) -> Reading:
        """The reading of the first rank to blame is the agreed one; another has seen its own."""
        if not self._told or self._told[0].reading.step != agreed.step:
            return agreed
        own = self._told[self.agreement.rank].reading
        # of a sharded gradient this rank's part may be finite though it made the bad one
        finite = own.grads_finite and agreed.grads_finite
        return replace(own, bad_ranks=agreed.bad_ranks, grads_finite=finite)

    # --- hold all parameters of a sharded model, so that one rank can run the step

    def _holders(self, step: Step, wanted: Sequence[int]) -> tuple[int, ...]:
        """Which of these ranks are to hold all parameters; the same on every rank."""
        if not self._shards or not self._told:
            return ()
        for told in self._told:
            if told.not_gathered:
                step.not_gathered = told.not_gathered
                return ()
        members = self.agreement.members
        holders = tuple(r for r in wanted if self._told[members.index(r)].has_room)
        if not holders:
            step.not_gathered = NO_ROOM
        return holders

    @contextmanager
    def _gathered(self, step: Step, holders: Sequence[int]) -> Iterator[None]:
        """Enter on all ranks at once: inside, the holders can run the step."""
        if not holders:
            yield
            return
        with gathered(step, hold=self.agreement.world_rank in holders):
            yield


# --- Who is to blame


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
    proven = _proven_trouble(reading)
    if proven != EXCHANGED:
        return proven
    return _gradient_trouble(step)


def _proven_trouble(reading: Reading) -> int:
    """What the reading alone proves, without running anything."""
    if reading.missed or (reading.bad_state and not reading.state_born):
        # a bad shard spoils the loss of every rank that gathers it, so it outranks a bad loss
        return HELD
    if reading.bad_inputs:
        return GIVEN
    if reading.bad_micro_batches or reading.bad_state or not all(map(math.isfinite, reading.lr)):
        return HERE
    if reading.grads_finite or reading.overflow:
        return 0
    return EXCHANGED


def _gradient_trouble(step: Step) -> int:
    """Were this rank's own gradients bad? Once they are averaged, only a replay tells."""
    if step.replayable:
        clean = rerun(step).grads_finite
    elif step.model_only:
        clean = gradients_came_back_finite(step) and model_finite(step)
    else:
        return EXCHANGED
    return 0 if clean else HERE


def _closer_look(step: Step, examine: Callable[[], Reading]) -> tuple[Reading, int]:
    try:
        own = examine()
        return own, own_trouble(step, own)
    except CollectiveInReplayError:
        # its tokens go to experts on other ranks, say: no rank can run it again by itself
        step.sharded = True
        own = examine()
        return own, own_trouble(step, own)


def _shortened(reading: Reading) -> Reading:
    """With as many names as anybody reads: what ranks exchange is not to grow with the model."""
    return replace(
        reading,
        bad_state=reading.bad_state[:MOST_NAMES],
        bad_inputs=reading.bad_inputs[:MOST_NAMES],
        bad_grads=reading.bad_grads[:MOST_NAMES],
        unnamed_grads=len(reading.bad_grads[MOST_NAMES:]),
    )


def _with_bad_parts(agreed: Reading, parts: Sequence[Reading]) -> Reading:
    """Add what others have seen in their parts of the gradients.

    The rank that made a bad gradient may hold a part of it in which all is finite.
    """
    bad = [part for part in parts if not part.grads_finite and not part.overflow]
    if not agreed.grads_finite or not bad:
        return agreed
    names: dict[str, None] = {}
    for part in bad:
        names.update(dict.fromkeys(part.bad_grads))
    return replace(agreed, grads_finite=False, grad_norm=bad[0].grad_norm, bad_grads=tuple(names))


def _asks_for_replay(reading: Reading) -> bool:
    """Can running the model again tell something? Not of what an optimizer made or keeps."""
    if reading.state_born:
        return reading.bad_state[0].startswith("buffer:")
    if not finite_step(reading):
        return True
    return bool(reading.bad_state) and not reading.bad_state[0].startswith("opt:")


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

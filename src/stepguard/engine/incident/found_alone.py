"""What one rank finds after its gradients were exchanged, too late for the others to hear of it.

Under DDP whatever a rank knows before its backward pass reaches the others with the gradients. A
learning rate or a gradient that turns NaN after it, or an update that makes NaN, may be one rank's
alone. That rank refuses its own update and says so with the gradients of the next step; then all
ranks go back to a state they share.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.detect.judge import alarming
from stepguard.engine.context import Context
from stepguard.records import Decision, Incident, Reading
from stepguard.sentinel.rank_agreement import RankAbsent

WAIT = 1.0
"""Seconds that a rank waits for others to find the same. They wait for it in the next step."""
WAIT_GRADIENT = 10.0
"""Bad gradients are almost always everybody's: a rank that is late is not to be taken for gone."""
MOST_NAMED = 8
WHAT = "what was found after the exchange"
LATER = "only this rank has seen it, after the gradients were exchanged: the others hear of it next"


class FoundAlone:
    """Tells whether the step at hand is bad on this rank only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.now = False
        """The others have gone on: nothing can be agreed on in this step."""

    def ask(self, reading: Reading) -> None:
        """Meet the ranks that have found something by themselves; not all come: none is waited for.

        Gradients that were bad before the exchange have told the others, who come at once.
        """
        self.now = False
        agreement = self._context.agreement
        if agreement.mode != "spread" or not _found_something(reading):
            return
        if reading.grads_finite:
            self.now = not agreement.all_here(WHAT, WAIT)
        elif agreement.follows_first_rank:
            came = agreement.all_here(WHAT, WAIT_GRADIENT)
            if not came and self._context.missed:
                # they were told with the gradients; to wait for them again would hold up the run
                others = [str(r) for r in agreement.members if r != agreement.world_rank]
                raise RankAbsent(
                    f"of rank {', '.join(others[:MOST_NAMED])} one did not come to a step that "
                    f"rank {agreement.world_rank} has found bad alone: has it a guard?"
                )
            # one that has disarmed or failed keeps away from this step's update, too
            self.now = not came and not agreement.absent(reading.step)

    def left_behind(self, incident: Incident) -> Incident:
        """This rank alone does without the update; the others hear of it with the next step."""
        context = self._context
        context.missed = (
            f"rank {context.agreement.world_rank} has refused the update of step {incident.step} "
            f"alone: {incident.verdict.summary}"
        )
        return replace(incident, decision=Decision(action="skip", reason=LATER))


def _found_something(reading: Reading) -> bool:
    if alarming(reading) or reading.state_born:
        return True
    return not all(map(math.isfinite, reading.lr))

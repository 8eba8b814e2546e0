"""What a planted mistake is: a code, a training, and a function that makes the loop wrong, or makes
it the healthy training that looks most like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zoo.silent.loops import TRAININGS, Loop

Change = Callable[[Loop, bool], None]


@dataclass(frozen=True, slots=True)
class Plant:
    """One mistake in one training."""

    code: str
    training: str
    name: str
    change: Change
    """Changes the loop: to the mistake, or to its healthy twin (False)."""

    def build(self, seed: int, *, wrong: bool) -> Loop:
        """The loop, ready to run; the caller seeds torch."""
        loop = TRAININGS[self.training](seed)
        self.change(loop, wrong)
        return loop


PLANTS: list[Plant] = []


def plant(code: str, training: str) -> Callable[[Change], Change]:
    """Register the function as a mistake that this code should tell."""

    def taken(change: Change) -> Change:
        PLANTS.append(Plant(code, training, change.__name__, change))
        return change

    return taken

"""Plain numbers that modules count with: an annealing step, a running temperature. A second run must not move them.

Every number of the user's own modules is watched for the first steps; after that only those that have moved, so that a
healthy step reads a handful of them. Not covered: numbers inside lists, dicts or other objects, and a counter that
first moves later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

FIRST_STEPS = 4
"""How often everything is looked at before only what moves is."""

Place = tuple[dict[str, Any], str]


class CounterKeeper:
    """Remembers the numbers of some modules at one moment and can go back to it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._kept: list[tuple[Place, int | float]] = []
        self._moved: dict[tuple[int, str], Place] = {}
        self._steps = 0

    def remember(self) -> None:
        """Take the present values."""
        if self._steps <= FIRST_STEPS:
            for (own, key), value in self._kept:
                if own.get(key) != value:
                    self._moved[id(own), key] = (own, key)
        everything = self._steps < FIRST_STEPS
        places = self._places() if everything else list(self._moved.values())
        self._kept = [((own, key), own[key]) for own, key in places if _counts(own.get(key))]
        self._steps += 1

    def restore(self) -> None:
        """Back to what `remember` took."""
        for (own, key), value in self._kept:
            if own.get(key) != value:
                own[key] = value

    def _places(self) -> list[Place]:
        owners = (m for root in self._modules for m in root.modules() if not type(m).__module__.startswith("torch."))
        return [(vars(m), key) for m in owners for key, value in vars(m).items() if _counts(value)]


def _counts(value: object) -> bool:
    return type(value) in (int, float)

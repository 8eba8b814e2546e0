"""Plain numbers that modules count with, for going back further than one step.

A number that has moved since the first look is part of the state; one that never has is the
program's own setting.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import nn


class ModuleNumbers:
    """Integers and floats of the user's own modules, by `ROOT/module:attribute`."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._first: dict[str, int | float] = {
            place: own[key] for place, own, key in self._places()
        }
        self._moving: set[str] = set()

    def moved(self) -> dict[str, int | float]:
        """The present value of every number that has moved since the guard was built."""
        present = {place: own[key] for place, own, key in self._places()}
        self._moving |= {
            place for place, value in present.items() if self._first.get(place, value) != value
        }
        return {place: value for place, value in present.items() if place in self._moving}

    def put_back(
        self, numbers: Mapping[str, int | float], left: Mapping[str, Container[str]] | None = None
    ) -> None:
        """Those that were moving at the time; those that began to move later go back to where they
        began.

        `left`: paths of modules below each root that are somebody else's.
        """
        for place, own, key in self._places(left):
            first = self._first
            value = numbers.get(place, first.get(place, own[key]))
            if own[key] != value:
                own[key] = value

    def _places(
        self, left: Mapping[str, Container[str]] | None = None
    ) -> Iterator[tuple[str, dict[str, Any], str]]:
        for prefix, root in self._roots.items():
            theirs = left.get(prefix, ()) if left is not None else ()
            for path, module in root.named_modules():
                if path in theirs or type(module).__module__.startswith("torch."):
                    continue
                own = vars(module)
                for key, value in own.items():
                    if type(value) in (int, float):
                        yield f"{prefix}{path}:{key}", own, key

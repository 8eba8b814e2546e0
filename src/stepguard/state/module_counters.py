"""Plain numbers that modules count with, kept with snapshots and checkpoints.

A number that has moved since the guard was built is part of the state; one that never has is the
program's own setting. Within one step `AttributeKeeper` puts attributes of any kind back.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import nn

from stepguard.state.plain_data import is_torchs

Number = int | float


class ModuleCounters:
    """Integers and floats of the user's own modules, by `ROOT/module:attribute`."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._first = self._present()
        self._moving: set[str] = set()

    def moved(self) -> dict[str, Number]:
        """Return the present value of every number that has moved since the guard was built."""
        present = self._present()
        for place, value in present.items():
            if self._first.get(place, value) != value:
                self._moving.add(place)
        return {place: value for place, value in present.items() if place in self._moving}

    def put_back(
        self, numbers: Mapping[str, Number], left: Mapping[str, Container[str]] | None = None
    ) -> None:
        """Put back the numbers that had moved by then; the others go back to their first value.

        `left`: paths of modules below each root that are left alone.
        """
        for place, attributes, key in self._places(left or {}):
            first = self._first.get(place, attributes[key])
            value = numbers.get(place, first)
            if attributes[key] != value:
                attributes[key] = value

    def _present(self) -> dict[str, Number]:
        return {place: attributes[key] for place, attributes, key in self._places({})}

    def _places(
        self, left: Mapping[str, Container[str]]
    ) -> Iterator[tuple[str, dict[str, Any], str]]:
        for prefix, root in self._roots.items():
            skipped = left.get(prefix, ())
            for path, module in root.named_modules():
                if path in skipped or is_torchs(module):
                    continue
                attributes = vars(module)
                for key, value in attributes.items():
                    # type() and not isinstance: bool is an int, and a flag is not a counter.
                    if type(value) in (int, float):
                        yield f"{prefix}{path}:{key}", attributes, key

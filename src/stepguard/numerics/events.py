"""Count what these functions had to leave out or limit.

A count is a tensor on the device it came from, so counting does not wait; `Events.counts` does.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Events:
    """Named counters. One is shared by all functions; give your own to keep a model's apart."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, torch.device], Tensor] = {}

    def add(self, name: str, happened: Tensor) -> None:
        """Add the number of true elements of `happened` (or its value, if it is a count)."""
        count = happened.detach().sum().to(torch.int64)
        key = (name, count.device)
        known = self._totals.get(key)
        # Not in place: a compiled graph returns the new total like any other output.
        self._totals[key] = count if known is None else known + count

    def counts(self) -> dict[str, int]:
        """Return all counts above 0, summed over devices; waits for the devices."""
        found: dict[str, int] = {}
        for (name, _), total in self._totals.items():
            found[name] = found.get(name, 0) + int(total)
        return {name: count for name, count in found.items() if count}

    def clear(self) -> None:
        """Start again at 0."""
        self._totals.clear()


events = Events()
"""What the functions count into when no other is given."""

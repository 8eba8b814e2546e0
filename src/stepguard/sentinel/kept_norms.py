"""Norms of single gradients in the last steps: kept on the device for nothing, read at an incident.

The norm of all gradients is made of the norms of each anyway. Keeping these costs a reference a
step; the host reads them only once something is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepguard.records.codec import float_kind
from stepguard.sentinel.gradients import GradientNorm

STEPS = 32
"""Steps that are remembered."""
MOST_MODULES = 40
"""Rows of the table; modules of a larger model are taken together by the first parts of their name.
"""


class GradientNorms:
    """The last steps in which every parameter had a gradient."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Tensor]] = deque(maxlen=STEPS)

    def keep(self, step: int, norm: GradientNorm | None) -> None:
        """Remember this step, where its norm was made of single ones. Waits for nothing."""
        if norm is not None and norm.single is not None:
            self._kept.append((step, norm.single))

    def table(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Norms by module and step, oldest first; None where there are none for these parameters.

        Non-finite norms are words: strict JSON has no such numbers.
        """
        kept = [(step, norms) for step, norms in self._kept if len(norms) == len(names)]
        if not kept:
            return None
        # one transfer for all steps
        every = torch.stack([norms.double() for _, norms in kept]).cpu()
        modules = _modules(names)
        rows = []
        for members in modules.values():
            together = torch.linalg.vector_norm(every[:, members], dim=1)
            rows.append([_plain(value) for value in together.tolist()])
        return {"steps": [step for step, _ in kept], "modules": list(modules), "norms": rows}


def _plain(value: float) -> float | str:
    return float_kind(value) or value


def _modules(names: Iterable[str]) -> dict[str, list[int]]:
    """Places of the parameters of each module; modules share a row where there are too many."""
    owners = [name.rpartition(".")[0] or name for name in names]
    depth = max(owner.count(".") for owner in owners) + 1
    grouped = _grouped(owners, depth)
    while len(grouped) > MOST_MODULES and depth > 1:
        depth -= 1
        grouped = _grouped(owners, depth)
    return dict(list(grouped.items())[:MOST_MODULES])


def _grouped(owners: Sequence[str], depth: int) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for place, owner in enumerate(owners):
        grouped.setdefault(".".join(owner.split(".")[:depth]), []).append(place)
    return grouped

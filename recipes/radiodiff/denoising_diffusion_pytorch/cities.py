"""Toy cities and their radio maps by a multi-wall model, and maps from files.

Path loss in dB: 40 + 22 log10(distance) + 6 for each wall entered + 0.8 for each cell inside a
building, along the straight ray from the transmitter. The gain is scaled to [-1, 1]; -1 is the
noise floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR, BEST = 105.0, 40.0
"""Path loss in dB at the noise floor and beside the transmitter."""
RAY_POINTS = 24


@dataclass(frozen=True, slots=True)
class Maps:
    """A batch: gain [n, 1, s, s] in [-1, 1]; condition [n, 3, s, s]: buildings, transmitter and its
    surroundings.
    """

    image: Tensor
    condition: Tensor


Plan = list[tuple[int, int, int, int]]
"""Top, left, height and width of each building, in cells."""


def city_plan(size: int, generator: torch.Generator) -> tuple[Plan, Tensor, tuple[int, int]]:
    """Random rectangular buildings, the map [s, s] that they make, and a free cell for the
    transmitter.
    """
    plan: Plan = []
    city = torch.zeros(size, size)
    for _ in range(int(torch.randint(4, 9, (1,), generator=generator))):
        top, left = torch.randint(0, size - 4, (2,), generator=generator).tolist()
        high, wide = torch.randint(3, 9, (2,), generator=generator).tolist()
        plan.append((top, left, high, wide))
        city[top : top + high, left : left + wide] = 1.0
    free = (city == 0).nonzero()
    row, column = free[int(torch.randint(0, len(free), (1,), generator=generator))].tolist()
    return plan, city, (row, column)


def cities(number: int, generator: torch.Generator, size: int = 32) -> Maps:
    """New cities with their radio maps."""
    plans = [city_plan(size, generator) for _ in range(number)]
    return radio_maps(
        torch.stack([city for _, city, _ in plans]), torch.tensor([cell for _, _, cell in plans])
    )


def radio_maps(buildings: Tensor, transmitters: Tensor) -> Maps:
    """The radio map of each city [n, s, s] for its transmitter [n, 2] (row, column)."""
    number, size, _ = buildings.shape
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    from_row, from_column = (transmitters[:, k, None, None] for k in (0, 1))
    distance = torch.sqrt(
        (row - from_row).float().square() + (column - from_column).float().square()
    )
    along = torch.linspace(0.0, 1.0, RAY_POINTS)
    rows = (from_row[..., None] + along * (row[..., None] - from_row[..., None])).round().long()
    columns = (
        (from_column[..., None] + along * (column[..., None] - from_column[..., None]))
        .round()
        .long()
    )
    seen = buildings[torch.arange(number)[:, None, None, None], rows, columns]
    walls = (seen[..., 1:] - seen[..., :-1]).clamp(min=0).sum(-1)
    inside = seen.mean(-1) * distance
    loss = BEST + 22.0 * torch.log10(distance.clamp(min=1.0)) + 6.0 * walls + 0.8 * inside
    gain = ((FLOOR - loss) / (FLOOR - BEST)).clamp(0.0, 1.0)
    return Maps(gain[:, None] * 2.0 - 1.0, condition_of(buildings, transmitters))


def condition_of(buildings: Tensor, transmitters: Tensor) -> Tensor:
    """What the network is told: buildings, transmitter, and the surroundings of the transmitter."""
    number, size, _ = buildings.shape
    spot = torch.zeros(number, size, size)
    spot[torch.arange(number), transmitters[:, 0], transmitters[:, 1]] = 1.0
    return torch.stack([buildings, spot, F.max_pool2d(spot[:, None], 5, 1, 2)[:, 0]], dim=1)


class Toy:
    """Endless new cities; `held_out` are others."""

    def __init__(self, batch_size: int, seed: int, size: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._batch_size, self._size = batch_size, size

    def draw(self) -> Maps:
        return cities(self._batch_size, self.generator, self._size)

    def held_out(self, number: int) -> Maps:
        return cities(number, torch.Generator().manual_seed(77), self._size)


class Stored:
    """Endless batches of the maps that `real_maps.py` has traced: `maps.npz` with `image` and
    `condition`.
    """

    HELD_OUT = 0.1
    """Share of the maps, the last ones, that are never trained on."""

    def __init__(self, folder: Path, batch_size: int, seed: int) -> None:
        path = folder / "maps.npz"
        if not path.is_file():
            raise SystemExit(
                f"data.name=real: {path} does not exist; make it with `python real_maps.py`."
            )
        with np.load(path, allow_pickle=False) as stored:
            self._maps = Maps(
                torch.from_numpy(stored["image"]), torch.from_numpy(stored["condition"])
            )
        self.generator = torch.Generator().manual_seed(seed)
        self._batch_size = batch_size
        self._trained = len(self._maps.image) - max(1, int(self.HELD_OUT * len(self._maps.image)))

    def draw(self) -> Maps:
        chosen = torch.randint(0, self._trained, (self._batch_size,), generator=self.generator)
        return Maps(self._maps.image[chosen], self._maps.condition[chosen])

    def held_out(self, number: int) -> Maps:
        rest = slice(self._trained, self._trained + number)
        return Maps(self._maps.image[rest], self._maps.condition[rest])

"""Toy cities and their radio maps by a multi-wall model, and maps from files.

Path loss in dB: 40 + 22 log10(distance) + 6 for each wall entered + 0.8 for each cell inside a building, along the straight
ray from the transmitter. The gain is scaled to [-1, 1]; -1 is the noise floor.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """A batch: gain [n, 1, s, s] in [-1, 1]; condition [n, 3, s, s] with buildings, transmitter and its surroundings."""

    image: Tensor
    condition: Tensor


def cities(number: int, generator: torch.Generator, size: int = 32) -> Maps:
    """Random rectangular buildings and a transmitter on a free cell."""
    buildings = torch.stack([_buildings(size, generator) for _ in range(number)])
    places = torch.stack([_free_cell(city, generator) for city in buildings])
    return radio_maps(buildings, places)


def radio_maps(buildings: Tensor, transmitters: Tensor) -> Maps:
    """The radio map of each city [n, s, s] for its transmitter [n, 2] (row, column)."""
    number, size, _ = buildings.shape
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    from_row, from_column = (transmitters[:, k, None, None] for k in (0, 1))
    distance = torch.sqrt((row - from_row).float().square() + (column - from_column).float().square())
    along = torch.linspace(0.0, 1.0, RAY_POINTS)
    rows = (from_row[..., None] + along * (row[..., None] - from_row[..., None])).round().long()
    columns = (from_column[..., None] + along * (column[..., None] - from_column[..., None])).round().long()
    seen = buildings[torch.arange(number)[:, None, None, None], rows, columns]
    walls = (seen[..., 1:] - seen[..., :-1]).clamp(min=0).sum(-1)
    inside = seen.mean(-1) * distance
    loss = BEST + 22.0 * torch.log10(distance.clamp(min=1.0)) + 6.0 * walls + 0.8 * inside
    gain = ((FLOOR - loss) / (FLOOR - BEST)).clamp(0.0, 1.0)
    spot = torch.zeros(number, size, size)
    spot[torch.arange(number), transmitters[:, 0], transmitters[:, 1]] = 1.0
    around = F.max_pool2d(spot[:, None], 5, 1, 2)[:, 0]
    return Maps(gain[:, None] * 2.0 - 1.0, torch.stack([buildings, spot, around], dim=1))


def _buildings(size: int, generator: torch.Generator) -> Tensor:
    city = torch.zeros(size, size)
    for _ in range(int(torch.randint(4, 9, (1,), generator=generator))):
        top, left = torch.randint(0, size - 4, (2,), generator=generator).tolist()
        high, wide = torch.randint(3, 9, (2,), generator=generator).tolist()
        city[top : top + high, left : left + wide] = 1.0
    return city


def _free_cell(city: Tensor, generator: torch.Generator) -> Tensor:
    free = (city == 0).nonzero()
    return free[int(torch.randint(0, len(free), (1,), generator=generator))]


def toy_batches(batch_size: int, seed: int, size: int) -> Iterator[Maps]:
    """Endless new cities."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield cities(batch_size, generator, size)


def stored_batches(folder: Path, batch_size: int, seed: int) -> Iterator[Maps]:
    """Endless batches of maps that `real_maps.py` has traced: `maps.npz` with `image` and `condition`."""
    with np.load(folder / "maps.npz", allow_pickle=False) as stored:
        image, condition = torch.from_numpy(stored["image"]), torch.from_numpy(stored["condition"])
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(0, len(image), (batch_size,), generator=generator)
        yield Maps(image[chosen], condition[chosen])

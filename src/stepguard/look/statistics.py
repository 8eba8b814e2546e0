"""Statistics of tensors as small vectors on their device, read back together at the end.

Nothing here waits for the device: a look must not add a sync to every operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepguard.locate.finite import plain

SAMPLE = 65_536
"""Elements of a tensor that shares are counted on; the extremes are taken over all of it."""
FIELDS = ("largest", "smallest", "zeros", "subnormal", "infinities", "lowest", "elements")
"""What the numbers of one vector are."""


@dataclass(slots=True)
class Numbers:
    """Vectors on their devices, and what each becomes on the host."""

    _vectors: list[Tensor] = field(default_factory=list)

    def add(self, vector: Tensor) -> int:
        """Keep a one-dimensional vector; returns its number for `read`."""
        self._vectors.append(vector)
        return len(self._vectors) - 1

    def read(self) -> list[list[float]]:
        """All vectors as numbers, with one copy from each device."""
        values: list[list[float]] = [[] for _ in self._vectors]
        by_device: dict[torch.device, list[int]] = {}
        for index, vector in enumerate(self._vectors):
            by_device.setdefault(vector.device, []).append(index)
        for indices in by_device.values():
            flat = torch.cat([self._vectors[index] for index in indices]).tolist()
            for index in indices:
                length = self._vectors[index].numel()
                values[index] = flat[:length]
                flat = flat[length:]
        return values


def sampled(values: Tensor, most: int = SAMPLE) -> Tensor:
    """Evenly spread elements of a tensor, as one row; a view where that is possible."""
    flat = values.reshape(-1)
    stride = max(1, math.ceil(flat.numel() / most))
    return flat[::stride]


def vector_of(tensor: Tensor) -> Tensor | None:
    """The statistics of one tensor, in the order of FIELDS; None where it holds no numbers."""
    values = plain(tensor)
    if not values.is_floating_point() or values.numel() == 0:
        return None
    limits = torch.finfo(values.dtype)
    if values.element_size() == 1:
        # torch has no reductions of 8-bit floats
        values = values.float()
    low, high = torch.aminmax(values)
    sample = sampled(values)
    sizes = sample.abs().to(_wide(sample.dtype))
    present = sizes > 0
    finite = torch.isfinite(sizes)
    smallest = torch.where(present, sizes, torch.inf).amin()
    largest = torch.where(finite, sizes, 0.0).amax()
    # finite extremes of the whole tensor count; an infinite one leaves the sample's largest
    whole = torch.maximum(low.abs(), high.abs()).to(sizes.dtype)
    largest = torch.where(torch.isfinite(whole), whole, largest)
    parts = (
        largest,
        smallest,
        (~present).sum(),
        (present & (sizes < limits.tiny)).sum(),
        torch.maximum((~finite).sum(), (~torch.isfinite(whole)).sum()),
        low,
    )
    numbers = [part.to(torch.float64).reshape(1) for part in parts]
    return torch.cat([*numbers, numbers[0].new_tensor([float(sample.numel())])])


def rounded_to_zero(before: Tensor, after: Tensor) -> Tensor:
    """How many elements a conversion turned into 0, and of how many, on a sample."""
    given = sampled(plain(before))
    got = sampled(plain(after))
    lost = ((given != 0) & (got == 0)).sum().to(torch.float64).reshape(1)
    return torch.cat([lost, lost.new_tensor([float(given.numel())])])


def bits_of_headroom(largest: float, dtype: torch.dtype) -> float | None:
    """Bits up to the largest number of the dtype."""
    if largest <= 0.0 or not math.isfinite(largest):
        return None
    return math.log2(torch.finfo(dtype).max) - math.log2(largest)


def bits_above_floor(smallest: float, dtype: torch.dtype) -> float | None:
    """Bits down to the smallest normal number of the dtype."""
    if smallest <= 0.0 or not math.isfinite(smallest):
        return None
    return math.log2(smallest) - math.log2(torch.finfo(dtype).tiny)


def root_mean_square(values: Tensor) -> Tensor:
    """As one number in float64, on a sample."""
    sample = sampled(values).to(torch.float64)
    return sample.square().mean().sqrt().reshape(1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.float64:
        return torch.float64
    return torch.float32

"""A number for the content of a tensor, taken on its own device: equal bits, equal number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stepguard.tensors.values import dense_values, is_lazy

PIECE = 1 << 20
"""Elements that are weighed at a time, so that the memory this takes is bounded."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def tensor_fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return shape, dtype and a weighted sum of the bits of each tensor."""
    sums = {name: _weighed(tensor) for name, tensor in tensors.items()}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        found[name] = f"{tensor.dtype}{list(tensor.shape)}:{int(sums[name])}"
    return found


@torch.no_grad()
def checksums(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return a number for each tensor, on its device and not waited for; None where there is none.

    Of a tensor that is spread over ranks it is the number of this rank's part.
    """
    found: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or is_lazy(tensor) or tensor.is_meta or tensor.is_nested:
            found.append(None)
        else:
            found.append(_weighed(dense_values(tensor)))
    return found


def read_checksums(sums: Iterable[Tensor | None]) -> list[int]:
    """Wait for the numbers; 0 where there is none."""
    waiting = list(sums)
    there = [number for number in waiting if number is not None]
    if not there:
        return [0] * len(waiting)
    device = there[0].device
    numbers = iter(torch.stack([number.to(device) for number in there]).tolist())
    return [0 if number is None else int(next(numbers)) for number in waiting]


def combined(numbers: Iterable[int]) -> int:
    """One number for several, 0 only where all of them are."""
    given = list(numbers)
    if not any(given):
        return 0
    content = json.dumps(given).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") or 1


def fact_fingerprint(value: Any) -> str:
    """Return a digest of a JSON value."""
    content = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _weighed(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits, each times an odd number of its place; int64 wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(_bits(tensor), PIECE):
        places = torch.arange(piece.numel(), device=piece.device, dtype=torch.int64)
        # a plain sum would not see two elements that changed places
        weights = (places * 0x2545F4914F6CDD1D) | 1
        total = total * 31 + (piece.to(torch.int64) * weights).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])

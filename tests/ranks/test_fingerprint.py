"""Equal bits give equal fingerprints, and any other bit, place, shape or dtype another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepguard.ranks import copies
from stepguard.ranks.copies import fact_fingerprint, fingerprints


def print_of(tensor: Tensor) -> str:
    return fingerprints({"x": tensor})["x"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.tensor([1j]), torch.tensor([-1j])),
        (torch.zeros(2), torch.full((2,), torch.nan)),
    ],
)
def test_what_differs_differs(one: Tensor, other: Tensor) -> None:
    assert print_of(one) != print_of(other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_copy_has_the_same_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 4).to(dtype)
    assert print_of(tensor) == print_of(tensor.clone())
    assert print_of(tensor.t()) == print_of(tensor.t().contiguous())


def test_every_piece_of_a_large_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE", 4)
    tensor = torch.randn(10)
    seen = {print_of(tensor)}
    for place in range(10):
        changed = tensor.clone()
        changed[place] += 1
        seen.add(print_of(changed))
    assert len(seen) == 11
    assert print_of(torch.empty(0)) == print_of(torch.empty(0))


def test_facts_are_compared_by_value() -> None:
    assert fact_fingerprint({"a": 1, "b": [None]}) == fact_fingerprint({"b": [None], "a": 1})
    assert fact_fingerprint({"a": 1}) != fact_fingerprint({"a": 2})

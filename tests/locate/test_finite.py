"""Finite or not, for every layout; and which infinities are a mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepguard.locate.operands import Flaws, flaws, mask_like, plain, storage_key

INF = math.inf


def sparse(value: float) -> Tensor:
    positions = torch.tensor([[0, 0, 2]])
    values = torch.tensor([1.0, value, 3.0])
    return torch.sparse_coo_tensor(positions, values, (4,), check_invariants=True)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, math.nan]), Flaws(nan=True)),
        (torch.tensor([1.0, -INF]), Flaws(inf=True)),
        (torch.tensor([3e38, 3e38]), Flaws()),
        (torch.tensor([60000.0, 60000.0], dtype=torch.float16), Flaws()),
        (torch.tensor([complex(1.0, math.nan)]), Flaws(nan=True)),
        (torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn), Flaws(nan=True)),
        (sparse(math.nan), Flaws(nan=True)),
        (sparse(2.0), Flaws()),
        (torch.empty(3, device="meta"), Flaws()),
        (torch.empty(0), Flaws()),
    ],
)
def test_kinds_of_bad_elements(tensor: Tensor, expected: Flaws) -> None:
    assert flaws(tensor) == expected


def test_values_of_a_sparse_tensor_keep_their_memory() -> None:
    tensor = sparse(2.0)
    assert plain(tensor).data_ptr() == tensor._values().data_ptr()
    assert storage_key(tensor) == storage_key(tensor._values())


def test_views_share_the_key_of_their_memory() -> None:
    tensor = torch.ones(4, 4)
    assert storage_key(tensor[1:, 2]) == storage_key(tensor)
    assert storage_key(tensor.clone()) != storage_key(tensor)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -INF, 0.0, 0.0], True),
        ([0.1, 0.2, -INF, 0.4], True),
        ([0.1, 0.2, 0.3, 0.4, 0.5, -INF], False),
        ([0.0, INF], False),
        ([0.0, -INF, math.nan], False),
    ],
)
def test_mask_is_minus_infinity_around_a_constant_or_much_of_it(
    values: list[float], expected: bool
) -> None:
    assert mask_like(torch.tensor(values)) is expected

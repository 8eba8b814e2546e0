"""Fixes that blame a number format: where it really ends, and what a clamp or an eps does there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stepguard import numerics


def test_bfloat16_has_the_range_of_float32() -> None:
    assert torch.finfo(torch.bfloat16).max == pytest.approx(3.39e38, rel=0.01)
    assert torch.finfo(torch.float16).max == 65504


@pytest.mark.parametrize(("dtype", "end"), [(torch.float32, 0.9), (torch.bfloat16, 1.0)])
def test_bfloat16_weights_do_not_move_at_the_rates_of_the_report(
    dtype: torch.dtype, end: float
) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones(1, dtype=dtype)
        optimizer.step()
    assert weight.item() == pytest.approx(end, abs=1e-3)


def test_a_uniform_time_is_exactly_one_in_bfloat16_once_in_512_draws() -> None:
    times = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    share = float((times.bfloat16() == 1).float().mean())
    assert share == pytest.approx(1 / 512, rel=0.1)
    assert not bool((times == 1).any())
    in_half = 1.0 / (1.0 - torch.tensor(0.9985).bfloat16())
    assert torch.isinf(in_half)


@pytest.mark.parametrize(
    ("dtype", "eps", "rows"),
    [
        (torch.float16, 1e-8, [0, 3, 4, 5, 6, 7]),
        (torch.float16, 1e-4, []),
        (torch.bfloat16, 1e-8, []),
    ],
)
def test_an_eps_of_1e_8_is_zero_in_float16_and_every_row_without_a_gradient_turns_nan(
    dtype: torch.dtype, eps: float, rows: list[int]
) -> None:
    table = nn.Embedding(8, 4).to(dtype)
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-4, eps=eps, fused=False)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert torch.isnan(table.weight).any(-1).nonzero().flatten().tolist() == rows


@pytest.mark.parametrize(("eps", "gain"), [(1e-20, 1e10), (1e-6, 1e3)])
def test_a_norm_with_an_eps_of_1e_20_multiplies_gradients_by_1e10_at_zero(
    eps: float, gain: float
) -> None:
    x = torch.zeros(1, 64, requires_grad=True)
    numerics.rms_norm(x, eps=eps).sum().backward()
    assert x.grad is not None and float(x.grad.max()) == pytest.approx(gain, rel=0.01)


def by_exp(scores: Tensor, eps: float = 0.0) -> Tensor:
    matrix = torch.exp(scores)
    for _ in range(20):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float32, 88.7), (torch.bfloat16, 88.5), (torch.float16, 11.0)],
    ids=str,
)
def test_exp_overflows_at_88_and_only_in_float16_at_11(dtype: torch.dtype, largest: float) -> None:
    assert torch.isfinite(torch.exp(torch.tensor(largest, dtype=dtype)))
    assert torch.isinf(torch.exp(torch.tensor(largest + 0.8, dtype=dtype)))


FIXES = {
    "exp": by_exp,
    "eps": lambda s: by_exp(s, 1e-8),
    "where": lambda s: torch.where(
        torch.isnan(made := by_exp(s)), torch.full_like(made, 0.5), made
    ),
    "clamp": lambda s: by_exp(s.clamp(-10.0, 10.0), 1e-8),
    "log": lambda s: numerics.sinkhorn(s).matrix,
}


@pytest.mark.parametrize(
    ("fix", "value", "slope"),
    [
        ("exp", "nan", "nan"),
        ("eps", "nan", "nan"),
        ("where", "finite", "nan"),
        ("clamp", "finite", "dead"),
        ("log", "finite", "alive"),
    ],
)
def test_of_the_fixes_of_sinkhorn_only_log_space_has_values_and_gradients(
    fix: str, value: str, slope: str
) -> None:
    scores = torch.tensor([[[100.0, 99.0], [99.5, 100.0]]], requires_grad=True)
    matrix = FIXES[fix](scores)
    (matrix * torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
    assert scores.grad is not None
    corner = float(scores.grad[0, 0, 0])

    assert ("finite" if bool(torch.isfinite(matrix).all()) else "nan") == value
    if slope == "nan":
        assert math.isnan(corner)
    else:
        assert (corner == 0.0) is (slope == "dead")


def test_the_reports_einsum_takes_the_diagonal_and_amplifies_nothing() -> None:
    streams, matrix = torch.randn(2, 4, 3, 5, 5), torch.rand(2, 4, 4).softmax(-1)
    mixed = torch.einsum("bnn,bnchw->bnchw", matrix, streams)
    assert torch.equal(mixed, matrix.diagonal(dim1=1, dim2=2)[..., None, None, None] * streams)
    assert float(mixed.norm() / streams.norm()) < 1.0


@pytest.mark.parametrize(("streams", "gain"), [(1, 1.5), (2, 1.5), (4, 2.25), (8, 4.125)])
def test_more_streams_grow_faster_because_the_read_out_adds_them(streams: int, gain: float) -> None:
    """A block that is only its own skip; H_pre = 1/2, H_post = 1, the report's diagonal 1/n."""
    x = torch.randn(1, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).expand(
        1, streams, 3, 4, 4
    )
    half, one = torch.full((1, streams), 0.5), torch.ones(1, streams)
    out = numerics.write_in(x / streams, numerics.read_out(x, half), one).mean(1)
    assert float(out.norm() / x[:, 0].norm()) == pytest.approx(gain)  # n / 2 + 1 / n

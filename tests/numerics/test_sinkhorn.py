"""Sinkhorn in log space: finite for scores of any size, and honest about its residual."""

from __future__ import annotations

import pytest
import torch

import stepguard
from stepguard import numerics

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_sinkhorn_is_finite_forward_and_backward_for_scores_of_any_size(size: float) -> None:
    scores = (torch.randn(3, 4, 4) * size).requires_grad_()
    found = numerics.sinkhorn(scores)
    (found.matrix * torch.randn(3, 4, 4)).sum().backward()
    assert torch.isfinite(found.matrix).all()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert torch.allclose(found.matrix.sum(-1), torch.ones(3, 4), atol=1e-5)


def test_sinkhorn_by_exp_overflows_where_ours_does_not() -> None:
    plain = torch.full((4, 4), 89.0).exp()
    assert torch.isinf(plain).all()
    assert torch.allclose(
        numerics.sinkhorn(torch.full((4, 4), 89.0)).matrix, torch.full((4, 4), 0.25)
    )


def test_sinkhorn_tells_how_far_it_is_from_doubly_stochastic() -> None:
    scores = torch.randn(5, 4, 4, dtype=torch.float64) * 3
    few, many = numerics.sinkhorn(scores, iterations=1), numerics.sinkhorn(scores, iterations=200)
    assert float(few.residual) == pytest.approx(float((few.matrix.sum(-2) - 1).abs().max()))
    assert float(many.residual) < 1e-3 < float(few.residual)


def test_sinkhorn_passes_gradcheck() -> None:
    scores = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: numerics.sinkhorn(s, iterations=5).matrix, (scores,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinkhorn_keeps_the_dtype_and_computes_wide(dtype: torch.dtype) -> None:
    scores = torch.full((2, 2), 60.0, dtype=dtype)
    found = numerics.sinkhorn(scores).matrix
    assert found.dtype == dtype
    assert torch.allclose(found.float(), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_sinkhorn_refuses_what_is_not_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(stepguard.ConfigError, match="square"):
        numerics.sinkhorn(torch.zeros(shape))

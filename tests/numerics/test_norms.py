"""RMSNorm: equal to torch, with a finite gradient at zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import stepguard
from stepguard import numerics

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_rms_norm_equals_torch_and_passes_gradcheck() -> None:
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(
        numerics.rms_norm(x, weight, eps=1e-6), F.rms_norm(x, (6,), weight, eps=1e-6)
    )
    assert torch.autograd.gradcheck(lambda a, w: numerics.rms_norm(a, w), (x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_rms_norms_at_zero_keeps_a_finite_gradient(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 8, dtype=dtype, requires_grad=True)
    numerics.RMSNorm(8)(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_rms_norm_of_large_half_precision_numbers_does_not_overflow() -> None:
    x = torch.full((1, 8), 3000.0, dtype=torch.float16)
    assert torch.allclose(numerics.rms_norm(x).float(), torch.ones(1, 8), atol=1e-3)


def test_an_eps_that_amplifies_without_limit_is_refused() -> None:
    with pytest.raises(stepguard.ConfigError, match="1e-20"):
        numerics.RMSNorm(8, eps=1e-20)

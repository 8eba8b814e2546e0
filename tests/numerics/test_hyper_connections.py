"""Reading, mixing and writing residual streams."""

from __future__ import annotations

import pytest
import torch

import stepguard
from stepguard import numerics


def test_mixing_uses_the_whole_matrix_and_not_its_diagonal() -> None:
    streams = torch.randn(2, 3, 4, 5, 5)
    matrix = torch.softmax(torch.randn(2, 3, 3), dim=-1).requires_grad_()
    mixed = numerics.mix_streams(streams, matrix)
    wanted = torch.stack(
        [sum(matrix[b, n, m] * streams[b, m] for m in range(3)) for b in range(2) for n in range(3)]
    )
    assert torch.allclose(mixed, wanted.reshape(mixed.shape), atol=1e-6)
    (mixed * torch.randn_like(mixed)).sum().backward()
    assert matrix.grad is not None
    assert bool((matrix.grad != 0).all())
    diagonal = torch.einsum("bnn,bnchw->bnchw", matrix, streams)
    assert not torch.allclose(mixed, diagonal)


def test_reading_and_writing_streams_are_the_sums_they_say() -> None:
    streams, weights, output = torch.randn(2, 3, 4), torch.rand(2, 3), torch.randn(2, 4)
    assert torch.allclose(
        numerics.read_out(streams, weights), (streams * weights[..., None]).sum(1), atol=1e-6
    )
    wanted = streams + weights[..., None] * output[:, None]
    assert torch.allclose(numerics.write_in(streams, output, weights), wanted, atol=1e-6)


def test_weights_that_do_not_fit_the_streams_are_named() -> None:
    with pytest.raises(stepguard.ConfigError, match=r"mix_streams.*\(2, 4, 4\).*\(2, 3, 5\)"):
        numerics.mix_streams(torch.zeros(2, 3, 5), torch.zeros(2, 4, 4))

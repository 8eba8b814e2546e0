"""Doubly stochastic matrices by Sinkhorn's iteration in log space, finite for any scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from stepguard._errors import ConfigError
from stepguard.tensors.values import at_least_float32

# --- RMSNorm in float32, with an eps that is felt in the backward as well.


SMALLEST_EPS = 1e-12
"""At zero input the gradient is multiplied by 1 / sqrt(eps): by a million with this one."""


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) over the last dimension, computed in float32."""
    wide = at_least_float32(x)
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        scaled = scaled * weight.to(scaled.dtype)
    return scaled.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight."""

    def __init__(self, features: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not SMALLEST_EPS <= eps < 1.0:
            raise ConfigError(
                f"RMSNorm: eps={eps!r} must lie between {SMALLEST_EPS:g} and 1; "
                "a smaller one multiplies gradients by more than a million where the input is 0."
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps:g}"


# --- Doubly stochastic matrices by Sinkhorn's iteration in log space, finite for any scores.


class Sinkhorn(NamedTuple):
    """The matrix, and how far it is from doubly stochastic."""

    matrix: Tensor
    residual: Tensor
    """Largest distance of a row or column sum from 1, detached, on the device."""


def sinkhorn(scores: Tensor, *, iterations: int = 20) -> Sinkhorn:
    """Scale rows and columns of exp(scores) [..., n, n] to sum to 1.

    exp is taken once, of numbers that are at most 0, so no score overflows (exp alone does at 88.7
    in float32 and at 11 in float16). The last half-step is over rows: they sum to 1 to rounding,
    columns to `residual`, which is what finitely many iterations leave. Compare it with the
    tolerance you need.
    """
    if scores.dim() < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ConfigError(
            f"sinkhorn: scores of shape {tuple(scores.shape)} are not square matrices [..., n, n]."
        )
    if iterations < 1:
        raise ConfigError(f"sinkhorn: iterations={iterations!r} must be at least 1.")
    log = at_least_float32(scores)
    for _ in range(iterations):
        log = log - torch.logsumexp(log, dim=-2, keepdim=True)
        log = log - torch.logsumexp(log, dim=-1, keepdim=True)
    matrix = log.exp()
    with torch.no_grad():
        columns = (matrix.sum(dim=-2) - 1.0).abs().amax()
        rows = (matrix.sum(dim=-1) - 1.0).abs().amax()
        residual = torch.maximum(columns, rows)
    return Sinkhorn(matrix.to(scores.dtype), residual)


# --- Hyper-connections: read n residual streams [batch, n, ...], mix them, write back.


def read_out(streams: Tensor, weights: Tensor) -> Tensor:
    """Return the block's input: the streams added with `weights` [batch, n]."""
    _fits("read_out", streams, weights, 2)
    return torch.einsum("bn,bn...->b...", weights.to(streams.dtype), streams)


def mix_streams(streams: Tensor, matrix: Tensor) -> Tensor:
    """Combine the streams by `matrix` [batch, n, n], whose rows are the new streams."""
    _fits("mix_streams", streams, matrix, 3)
    return torch.einsum("bnm,bm...->bn...", matrix.to(streams.dtype), streams)


def write_in(streams: Tensor, output: Tensor, weights: Tensor) -> Tensor:
    """Add the block's `output` [batch, ...] to each stream with its weight [batch, n]."""
    _fits("write_in", streams, weights, 2)
    return streams + torch.einsum("bn,b...->bn...", weights.to(output.dtype), output)


def _fits(function: str, streams: Tensor, weights: Tensor, dims: int) -> None:
    wanted_shape = (*streams.shape[:2], *streams.shape[1:2])[:dims]
    if weights.shape != wanted_shape or streams.dim() < 2:
        wanted = "[batch, n]" if dims == 2 else "[batch, n, n]"
        raise ConfigError(
            f"{function}: weights {tuple(weights.shape)} do not fit streams "
            f"{tuple(streams.shape)}; give {wanted}."
        )

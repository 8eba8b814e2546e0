"""Hyper-connections: read n residual streams [batch, n, ...], mix them, write back.

The mixing names two different stream indices. 'bnn,bn...->bn...' looks alike and takes only the
diagonal of the matrix, so that nothing is mixed and the rest of it never gets a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepguard._errors import ConfigError


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

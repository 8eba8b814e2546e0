"""Residual blocks, hyper-connections around them, the spatial transformer and the fusion over
frames.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.models.probes import Probes
from stepguard.numerics import mix_streams, read_out, rms_norm, sinkhorn, write_in

Sinkhorn = Literal["exp", "log", "clamp"]
Mixing = Literal["diag", "full"]
ITERATIONS = 20


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a skip."""

    def __init__(self, given: int, made: int, stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(given, made, 3, stride, 1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.conv2, self.bn2 = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made)
        same = stride == (1, 1) and given == made
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.skip(x))


def sinkhorn_exp(scores: Tensor) -> Tensor:
    """The original: exp overflows at 88.7 in float32, and Inf / Inf is NaN."""
    matrix = torch.exp(scores)
    for _ in range(ITERATIONS):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


def sinkhorn_clamp(scores: Tensor) -> Tensor:
    """The report's fix: no overflow, and no gradient beyond 10 either."""
    matrix = torch.exp(scores.clamp(-10.0, 10.0))
    for _ in range(ITERATIONS):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-8)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-8)
    return torch.where(torch.isnan(matrix), torch.full_like(matrix, 1.0 / matrix.shape[-1]), matrix)


def project(scores: Tensor, kind: Sinkhorn) -> Tensor:
    """Scores [b, n, n] to (nearly) doubly stochastic matrices."""
    if kind == "exp":
        return sinkhorn_exp(scores)
    return (
        sinkhorn_clamp(scores)
        if kind == "clamp"
        else sinkhorn(scores, iterations=ITERATIONS).matrix
    )


class HyperConnection(nn.Module):
    """Routes n streams [b, n, c, h, w] around a block: read-out, block, write-in, mixing."""

    def __init__(
        self,
        channels: int,
        n: int,
        *,
        name: str,
        kind: Sinkhorn,
        mix: Mixing,
        eps: float,
        probes: Probes,
    ) -> None:
        super().__init__()
        self.n, self.name, self.kind, self.mix, self.eps = n, name, kind, mix, eps
        self.phi = nn.Linear(n * channels, 2 * n + n * n)
        self.weight = nn.Parameter(torch.ones(n * channels))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.full((1,), 0.01)) for _ in range(3)
        )
        self._probes = probes

    def alphas(self) -> dict[str, Tensor]:
        return {
            "Alpha pre": self.alpha_pre,
            "Alpha post": self.alpha_post,
            "Alpha res": self.alpha_res,
        }

    def coefficients(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre [b, n], H_post [b, n] and H_res [b, n, n] from the pooled streams."""
        n = self.n
        pooled = streams.mean((-1, -2)).flatten(1)
        self._probes.look(self.name, 0, pooled, "pooled", **self.alphas())
        made = self.phi(rms_norm(pooled, self.weight, eps=self.eps))
        if self.kind == "clamp":
            made = made.clamp(-5.0, 5.0)
        scores = self.alpha_res * made[:, 2 * n :].reshape(-1, n, n)
        self._probes.follow(self.name, scores)
        pre = torch.sigmoid(self.alpha_pre * made[:, :n])
        post = 2.0 * torch.sigmoid(self.alpha_post * made[:, n : 2 * n])
        return pre, post, project(scores, self.kind)

    def forward(self, streams: Tensor, block: nn.Module) -> Tensor:
        return apply_mhc(self, streams, block, self._probes)


def apply_mhc(mhc: HyperConnection, streams: Tensor, block: nn.Module, probes: Probes) -> Tensor:
    """One block under hyper-connections, with the five probes of the report.

    No value is replaced, except with the report's own fix (`clamp`): its "safe exit" gives the
    input back.
    """
    pre, post, matrix = mhc.coefficients(streams)
    h_in = read_out(streams, pre)
    probes.look(mhc.name, 1, h_in, "h_in", **{"H_pre stats": pre})
    h_out = block(h_in)
    probes.look(mhc.name, 2, h_out, "h_out", Sublayer=type(block).__name__, **{"h_in stats": h_in})
    if mhc.mix == "full":
        mixed = mix_streams(streams, matrix)
    else:
        mixed = streams * matrix.diagonal(dim1=1, dim2=2)[..., None, None, None]
    probes.look(mhc.name, 3, mixed, "mixed", **{"H_res stats": matrix})
    out = write_in(mixed, h_out, post)
    probes.look(mhc.name, 4, out, "out", **{"H_post stats": post}, **mhc.alphas())
    if mhc.kind == "clamp" and not bool(torch.isfinite(out).all()):
        return streams
    return out


class SpatialTransformer(nn.Module):
    """Straightens a frame by an affine map; the identity at the beginning."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(channels, 8, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d((4, 8)), nn.Flatten()
        )
        self.move = nn.Linear(8 * 32, 6)
        nn.init.zeros_(self.move.weight)
        with torch.no_grad():
            self.move.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.move(self.look(x)).view(-1, 2, 3)
        return F.grid_sample(
            x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
        )


class FrameFusion(nn.Module):
    """Weighs the frames of a track at every column."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Sequential(
            nn.Conv2d(features, features // 8, 1), nn.ReLU(), nn.Conv2d(features // 8, 1, 1)
        )

    def forward(self, x: Tensor, frames: int) -> Tensor:
        weights = self.score(x).view(-1, frames, 1, 1, x.shape[-1]).softmax(dim=1)
        fused: Tensor = (x.view(-1, frames, *x.shape[1:]) * weights).sum(1)
        return fused

"""MMDiT: text tokens and one latent token, each with its own weights, in one attention; conditioned
on both times.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard.numerics import mix_streams, read_out, write_in

FREQUENCIES = 32
MODALITIES = 2
"""Text, latent."""


class TimeEmbedding(nn.Module):
    """Sinusoids of a time in [0, 1], in float32, then a small network in the weights' dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(self, t: Tensor) -> Tensor:
        steps = torch.arange(FREQUENCIES, device=t.device) / FREQUENCIES
        angles = 1000.0 * t.float()[:, None] * torch.exp(-math.log(1e4) * steps)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        out: Tensor = self.net(waves.to(self.net[0].weight.dtype))
        return out


class AdaptiveNorm(nn.Module):
    """LayerNorm whose scale and shift come from the condition; it starts as a plain one."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.scale, self.shift = _constant(condition, width, 1.0), _constant(condition, width, 0.0)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        out: Tensor = self.norm(x) * self.scale(c)[:, None] + self.shift(c)[:, None]
        return out


class Residual(nn.Module):
    """x + branch(x); with several streams read, mixed and written by learned weights
    (hyper-connections).
    """

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams
        if streams > 1:
            self.read = nn.Parameter(torch.full((streams,), 1.0 / streams))
            self.write = nn.Parameter(torch.ones(streams))
            self.mix = nn.Parameter(torch.eye(streams))

    def take(self, x: Tensor) -> Tensor:
        return x if self.streams == 1 else read_out(x, self.read.expand(len(x), -1))

    def put(self, x: Tensor, branch: Tensor) -> Tensor:
        if self.streams == 1:
            return x + branch
        mixed = mix_streams(x, self.mix.expand(len(x), -1, -1))
        return write_in(mixed, branch, self.write.expand(len(x), -1))


class Block(nn.Module):
    """Attention over the tokens of both modalities, then a feed-forward network for each."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        width, condition, streams = model.hidden_size, model.cond_dim, model.num_residual_streams
        self.heads, self.qk_rmsnorm, self.dropout = model.n_heads, model.qk_rmsnorm, model.dropout
        both = range(MODALITIES)
        self.before_attention = nn.ModuleList([AdaptiveNorm(width, condition) for _ in both])
        self.before_feed = nn.ModuleList([AdaptiveNorm(width, condition) for _ in both])
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width, bias=False) for _ in both])
        self.out = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in both])
        self.feed = nn.ModuleList([_feed_forward(width, model.dropout) for _ in both])
        self.attention_gain = nn.ModuleList([_constant(condition, width, 1.0) for _ in both])
        self.feed_gain = nn.ModuleList([_constant(condition, width, 1.0) for _ in both])
        self.around_attention = nn.ModuleList([Residual(streams) for _ in both])
        self.around_feed = nn.ModuleList([Residual(streams) for _ in both])

    def forward(self, xs: list[Tensor], c: Tensor) -> list[Tensor]:
        attended = self._attention(
            [r.take(x) for r, x in zip(self.around_attention, xs, strict=True)], c
        )
        for i in range(MODALITIES):
            xs[i] = self.around_attention[i].put(
                xs[i], self.attention_gain[i](c)[:, None] * attended[i]
            )
            fed = self.feed[i](self.before_feed[i](self.around_feed[i].take(xs[i]), c))
            xs[i] = self.around_feed[i].put(xs[i], self.feed_gain[i](c)[:, None] * fed)
        return xs

    def _attention(self, xs: list[Tensor], c: Tensor) -> list[Tensor]:
        joined = torch.cat(
            [self.qkv[i](self.before_attention[i](xs[i], c)) for i in range(MODALITIES)], dim=1
        )
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joined.chunk(3, dim=-1)
        )
        if self.qk_rmsnorm:
            q, k = (F.rms_norm(part, (part.shape[-1],)) for part in (q, k))
        dropped = self.dropout if self.training else 0.0
        seen = (
            F.scaled_dot_product_attention(q, k, v, dropout_p=dropped).transpose(1, 2).flatten(-2)
        )
        parts = seen.split([x.shape[1] for x in xs], dim=1)
        return [self.out[i](part) for i, part in enumerate(parts)]


class MMDiT(nn.Module):
    """Logits of the tokens and what is asked about the latent, from both noised."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        width = model.hidden_size
        self.mask_id, self.streams = model.vocab_size, model.num_residual_streams
        self.text_embed = nn.Embedding(model.vocab_size + 1, width)
        self.position = nn.Parameter(0.02 * torch.randn(model.max_seq_len, width))
        self.latent_proj = nn.Sequential(
            nn.Linear(model.latent_dim, 2 * width),
            nn.LayerNorm(2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )
        self.latent_position = nn.Parameter(0.02 * torch.randn(1, width))
        self.text_time, self.latent_time = TimeEmbedding(width), TimeEmbedding(width)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(2 * width, model.cond_dim), nn.SiLU())
        self.blocks = nn.ModuleList([Block(model) for _ in range(model.n_blocks)])
        self.text_norm, self.latent_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.text_head = nn.Linear(width, model.vocab_size)
        self.latent_head = nn.Sequential(
            nn.Linear(width, width),
            nn.GELU(),
            nn.Dropout(model.dropout),
            nn.Linear(width, model.latent_dim),
        )

    def forward(
        self, tokens: Tensor, latent: Tensor, t_text: Tensor, t_latent: Tensor
    ) -> tuple[Tensor, Tensor]:
        c = self.condition(torch.cat([self.text_time(t_text), self.latent_time(t_latent)], dim=-1))
        text = self.text_embed(tokens) + self.position[: tokens.shape[1]]
        one = self.latent_proj(latent.to(self.position.dtype))[:, None] + self.latent_position
        xs = [self._spread(text), self._spread(one)]
        for block in self.blocks:
            xs = block(xs, c)
        if self.streams > 1:  # autocast has mixed them in half precision
            xs = [x.sum(dim=1).to(self.position.dtype) for x in xs]
        text, one = xs
        return self.text_head(self.text_norm(text)), self.latent_head(self.latent_norm(one))[:, 0]

    def _spread(self, x: Tensor) -> Tensor:
        return x if self.streams == 1 else x[:, None].expand(-1, self.streams, -1, -1)


def _constant(condition: int, width: int, value: float) -> nn.Linear:
    """A linear function of the condition that starts as a constant."""
    layer = nn.Linear(condition, width)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, value)
    return layer


def _feed_forward(width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
    )

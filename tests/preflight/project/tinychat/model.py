"""A model of two heads: the next token, and a latent of the sound that goes with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TinyChat(nn.Module):
    """Embedding, norm, a gated mixing layer and two heads."""

    def __init__(self, vocab: int = 16, hidden: int = 8, *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.norm = norm if norm is not None else nn.LayerNorm(hidden)
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.mix = nn.Linear(hidden, hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, vocab)
        self.sound = nn.Linear(hidden, 16)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.norm(self.embed(input_ids))
        states = states + self.alpha * torch.tanh(self.mix(states))
        pooled = self.batch_norm(states.mean(dim=1))
        return self.head(nn.functional.dropout(states, 0.1, self.training)), self.sound(pooled)

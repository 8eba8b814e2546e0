"""Sequences packed into one row: attention over segments and padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, tokens


class PackedBlock(nn.Module):
    """Attention within the segments of a pack, then a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), SegmentAttention()
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x), visible)
        added: Tensor = self.mlp(x)
        return x + added


class SegmentAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        mixed: Tensor = self.out(scores.masked_fill(~visible, -INF).softmax(-1) @ v)
        return mixed


class PackedLM(nn.Module):
    """Two checkpointed blocks; `reflexive` lets every row see at least itself."""

    def __init__(self, *, reflexive: bool) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(12, 8), nn.ModuleList([PackedBlock(), PackedBlock()])
        self.head, self.reflexive = nn.Linear(8, 12), reflexive

    def forward(self, ids: Tensor, segment: Tensor) -> Tensor:
        length = ids.shape[1]
        visible = (segment[:, :, None] == segment[:, None, :]) & (segment[:, None, :] > 0)
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
        if self.reflexive:
            visible = visible | torch.eye(length, dtype=torch.bool)
        x = self.emb(ids)
        for block in self.blocks:
            x = checkpoint(block, x, visible, use_reentrant=False)
        scores: Tensor = self.head(x)
        return scores


@incident(
    "NVIDIA-NeMo/Automodel#2826",
    expected=Expected(
        step=2, phase="forward", module="blocks.0.attn", op="aten._softmax", event="nan", sample=1
    ),
    accepted=("SG204",),
)
def packed_padding_rows_fully_masked(fixed: bool) -> Scene:
    """The padding at the end of a short pack belongs to no segment, so that its rows see nothing at
    all.
    """
    torch.manual_seed(0)
    model = PackedLM(reflexive=fixed)

    def batch(step: int) -> Batch:
        ids = tokens(3, 8, seed=step, low=1, high=12)
        segment, y = torch.tensor([1, 1, 1, 2, 2, 2, 3, 3]).repeat(3, 1), ids.roll(-1, 1)
        if step == 2:
            segment[1, 6:], ids[1, 6:], y[1, 5:] = 0, 0, -100
        return {"ids": ids, "segment": segment, "y": y}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(
            model(b["ids"], b["segment"]).flatten(0, 1), b["y"].flatten()
        ),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=3,
        clip=1.0,
    )

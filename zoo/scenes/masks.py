"""Attention masks that leave nothing to attend to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, Attention, randn, sgd, tokens


class Pooled(nn.Module):
    """Embedding, nn.MultiheadAttention with a padding mask, mean pooling."""

    def __init__(self, *, unmask_first: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.unmask_first = unmask_first

    def forward(self, ids: Tensor) -> Tensor:
        pad = ids.eq(0)
        if self.unmask_first:
            pad = pad & ~(pad.all(1, keepdim=True) & (torch.arange(ids.shape[1]) == 0))
        x = self.emb(ids)
        return self.head(self.attn(x, x, x, key_padding_mask=pad)[0].mean(1))


@incident(
    "pytorch/pytorch#41508",
    "pytorch/pytorch#40932",
    "pytorch/pytorch#160064",
    expected=Expected(
        step=1, phase="forward", module="attn", op="aten._softmax", event="nan", sample=1
    ),
    accepted=("SG204",),
)
def mha_all_keys_masked(fixed: bool) -> Scene:
    """Sample 1 of the second batch is empty: its row of key_padding_mask is all True."""
    torch.manual_seed(0)
    model = Pooled(unmask_first=fixed)

    def batch(step: int) -> Batch:
        ids = tokens(4, 5, seed=step, low=1, high=10)
        if step == 1:
            ids[1] = 0
        return {"ids": ids, "y": torch.tensor([0, 1, 2, 0])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class HalfMask(nn.Module):
    """Causal and padding mask as one additive fp16 tensor."""

    def __init__(self, *, low: float) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.attn = Attention(4)
        self.head = nn.Linear(4, 2)
        self.low = low
        with torch.no_grad():  # positive embeddings against opposite keys: scores near -30
            self.emb.weight.copy_(1 + 0.4 * self.emb.weight.sigmoid())
            self.attn.q.weight.copy_(4 * torch.eye(4))
            self.attn.k.weight.copy_(-4 * torch.eye(4))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        blocked = ids.eq(0)[:, None, :] | torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.head(
            self.attn(self.emb(ids), blocked.to(self.emb.weight.dtype) * self.low)[:, -1]
        )


@incident(
    "huggingface/transformers#17306",
    "NVIDIA-NeMo/Automodel#2658",
    "huggingface/transformers#25284",
    expected=Expected(
        step=1,
        phase="forward",
        module="attn",
        op="aten.add",
        event="inf",
        sample=0,
        loss_finite=True,
        proof={"then": ("aten._softmax", "attn")},
    ),
    accepted=("SG301", "SG204"),
)
def mask_finfo_min_plus_score_fp16(fixed: bool) -> Scene:
    """Left padding in fp16: row 0 is masked with finfo.min throughout, and adding a score below -16
    gives -inf.
    """
    torch.manual_seed(0)
    model = HalfMask(low=-1e4 if fixed else torch.finfo(torch.float16).min).half()

    def batch(step: int) -> Batch:
        ids = torch.tensor([[1, 2, 3, 4], [5, 1, 2, 3]])
        if step == 1:
            ids[0] = torch.tensor([0, 0, 1, 2])
        return {"ids": ids, "y": torch.tensor([0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).float(), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


class PaddedNet(nn.Module):
    """Attention whose padding is a -inf additive mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.attn, self.out = nn.Linear(3, 4), Attention(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        mask = torch.zeros(pad.shape).masked_fill(pad, -INF)[:, None, :]
        return self.out(self.attn(self.inp(x), mask).mean(1))


@incident(
    "Junjue-Wang/FactSeg#6",
    "lucidrains/stylegan2-pytorch#100",
    "facebookresearch/fairseq#1529",
    expected=Expected(
        step=0,
        phase="forward",
        module="attn",
        op="aten._softmax",
        event="nan",
        sample=1,
        proof={"scale_collapse": True},
    ),
    accepted=("SG204",),
)
def scaler_death_spiral(fixed: bool) -> Scene:
    """A collate bug empties one sample of every batch: GradScaler skips each step, its scale falls
    towards 0.
    """
    torch.manual_seed(0)
    model = PaddedNet()

    def batch(step: int) -> Batch:
        pad = torch.zeros(2, 3, dtype=torch.bool)
        pad[1] = not fixed
        return {"x": randn(2, 3, 3, seed=step), "pad": pad, "y": torch.tensor([0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["pad"]), b["y"])

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model),
        steps=12,
        scaler={"init_scale": 2.0**10},
    )

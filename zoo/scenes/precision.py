"""Half precision: activations, accumulated gradients and an epsilon that do not fit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import chain, sgd


class FeedForward(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        nn.init.constant_(self.wi.weight, value)
        nn.init.constant_(self.wo.weight, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.wi(x).relu())


class Block(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(8), FeedForward(value)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm(x) + 2.0)


class Encoder(nn.Module):
    """Two blocks, the second with the large weights of a pretrained checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 8)
        self.block = nn.ModuleList([Block(0.05), Block(12.0)])
        self.final_norm, self.head = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.block:
            x = block(x)
        return self.head(self.final_norm(x))


@incident(
    "huggingface/transformers#5651",
    "huggingface/transformers#9295",
    "huggingface/transformers#4586",
    expected=Expected(step=0, phase="forward", module="block.1.ff.wo", op="aten.mm", event="inf"),
    accepted=("SG301",),
)
def t5_ffn_fp16_overflow(fixed: bool) -> Scene:
    """fp16 autocast: the output projection of the second feed-forward exceeds 65504."""
    torch.manual_seed(0)
    model = Encoder()

    def batch(step: int) -> Batch:
        return {
            "ids": torch.tensor([[1, 2, 3], [4, 5, 1]]),
            "y": torch.tensor([[2, 3, 4], [5, 1, 2]]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).flatten(0, 1).float(), b["y"].flatten())

    precision = torch.bfloat16 if fixed else torch.float16
    return Scene(
        model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-5), steps=1, autocast=precision
    )


@incident(
    "afiaka87/glide-finetune#5",
    "NVIDIA/apex#240",
    "jinxixiang/magic_animate_unofficial#6",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.addcdiv_",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "emb.weight"},
    ),
    accepted=("SG502",),
)
def adam_eps_underflow_fp16(fixed: bool) -> Scene:
    """fp16 weights under Adam: eps=1e-8 is 0, rows without gradient become 0 / 0. The loss breaks a
    step later.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(6, 4), head=nn.Linear(4, 2)).half()
    ids = [[1, 2], [1, 2], [3, 1]]

    def batch(step: int) -> Batch:
        return {"ids": torch.tensor(ids[step]), "y": torch.tensor([0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).float(), b["y"])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4 if fixed else 1e-8)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)


@incident(
    "deepspeedai/DeepSpeed#8035",
    expected=Expected(
        step=0,
        phase="backward",
        op="aten.add_",
        node="torch::autograd::AccumulateGrad",
        event="inf",
        micro=2,
        loss_finite=True,
    ),
    accepted=("SG301",),
)
def fp16_grad_accumulation_overflow(fixed: bool) -> Scene:
    """Every micro-batch gradient is about 3e4; their fp16 sum exceeds 65504 in the third
    micro-batch.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    model = model if fixed else model.half()
    dtype = model.weight.dtype

    def batch(step: int) -> list[Batch]:
        return [{"x": torch.full((1, 2), 30000.0).to(dtype)} for _ in range(4)]

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (model(b["x"] / 30000.0) * 30000.0).sum()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6), steps=1)

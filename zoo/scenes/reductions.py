"""Means over nothing and divisions by a measured zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import chain, randn, sgd, tokens


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))


@incident(
    "NVIDIA-NeMo/Automodel#3796",
    "allenai/OLMo-core#452",
    "OpenRLHF/OpenRLHF#583",
    expected=Expected(step=2, phase="loss", op="aten.div", event="nan"),
    accepted=("SG102",),
)
def masked_mean_no_valid_token(fixed: bool) -> Scene:
    """sum(loss * mask) / mask.sum() on a batch without a supervised token."""
    model = language_model()

    def batch(step: int) -> Batch:
        ids = tokens(2, 4, seed=step)
        return {
            "ids": ids,
            "y": ids.roll(-1, 1),
            "mask": torch.zeros(2, 4) if step == 2 else torch.ones(2, 4),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        each = F.cross_entropy(
            model(b["ids"]).flatten(0, 1), b["y"].flatten(), reduction="none"
        ).view(2, 4)
        count = b["mask"].sum()
        return (each * b["mask"]).sum() / (count.clamp_min(1) if fixed else count)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@incident(
    "pytorch/pytorch#70348",
    "karpathy/nanochat#618",
    "pytorch/pytorch#75181",
    expected=Expected(
        step=1, phase="loss", op="aten.nll_loss_forward", event="nan", grads_finite=True
    ),
    accepted=("SG102",),
)
def ce_all_labels_ignored(fixed: bool) -> Scene:
    """Every label is -100: the loss is NaN, yet on CPU the gradients are exactly 0 and the weights
    survive.
    """
    model = language_model()

    def batch(step: int) -> Batch:
        ids = tokens(2, 4, seed=step)
        return {"ids": ids, "y": torch.full_like(ids, -100) if step == 1 else ids.roll(-1, 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        logits, y = model(b["ids"]).flatten(0, 1), b["y"].flatten()
        if fixed:
            return F.cross_entropy(logits, y, reduction="sum") / y.ne(-100).sum().clamp_min(1)
        return F.cross_entropy(logits, y)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class DoRA(nn.Module):
    """Weight-decomposed adapter: magnitude times direction, the direction divided by its norm."""

    def __init__(self, width: int, *, least: float) -> None:
        super().__init__()
        weight = randn(width, width, seed=3)
        weight[2] = 0
        self.register_buffer("w", weight)
        self.a = nn.Parameter(randn(2, width, seed=4) * 0.1)
        self.b = nn.Parameter(torch.zeros(width, 2))
        self.mag = nn.Parameter(weight.norm(dim=1))
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        weight = self.w + self.b @ self.a
        norm = weight.norm(dim=1).detach()
        if self.least:
            norm = norm.clamp_min(self.least)
        return x @ (weight * (self.mag / norm)[:, None]).T


@incident(
    "huggingface/peft#2049",
    "KohakuBlueleaf/LyCORIS#166",
    expected=Expected(step=0, phase="forward", module="o_proj", op="aten.div", event="nan"),
    accepted=("SG201",),
)
def dora_zero_weight_row(fixed: bool) -> Scene:
    """DoRA on a projection with an all-zero row: magnitude / norm is 0 / 0."""
    torch.manual_seed(0)
    model = chain(
        q_proj=nn.Linear(3, 4), o_proj=DoRA(4, least=1e-7 if fixed else 0.0), head=nn.Linear(4, 2)
    )

    def batch(step: int) -> Batch:
        return {"x": randn(3, 3, seed=step), "y": torch.tensor([0, 1, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)


class FrontEnd(nn.Module):
    """Normalises every clip by its own standard deviation."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, wave: Tensor) -> Tensor:
        spread = wave.std(-1, keepdim=True)
        return (wave - wave.mean(-1, keepdim=True)) / (
            spread.clamp_min(self.least) if self.least else spread
        )


@incident(
    "maxrmorrison/torchcrepe#5",
    "yxlu-0102/MP-SENet#33",
    "philipperemy/deep-speaker#5",
    expected=Expected(
        step=1, phase="forward", module="frontend", op="aten.div", event="nan", sample=2
    ),
    accepted=("SG201",),
)
def silent_clip_normalised_by_std(fixed: bool) -> Scene:
    """Sample 2 of the second batch is digital silence, so its standard deviation is 0."""
    torch.manual_seed(0)
    model = chain(
        frontend=FrontEnd(least=1e-5 if fixed else 0.0),
        conv=nn.Conv1d(1, 4, 5),
        act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool1d(1),
        flat=nn.Flatten(),
        head=nn.Linear(4, 2),
    )

    def batch(step: int) -> Batch:
        wave = randn(4, 1, 32, seed=step)
        if step == 1:
            wave[2] = 0
        return {"w": wave, "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["w"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

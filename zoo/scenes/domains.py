"""Arguments outside the domain of a function, in the forward pass."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import randn, sgd


@incident(
    "open-mmlab/mmdetection#3397",
    "open-mmlab/mmdetection#3315",
    "open-mmlab/mmdetection#3013",
    expected=Expected(step=1, phase="loss", op="aten.log", event="nan", sample=2),
    accepted=("SG104", "SG202"),
)
def bbox_log_of_bad_annotation(fixed: bool) -> Scene:
    """Box targets are log(width / anchor); one annotation has its corners swapped."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        box = torch.tensor([[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 5.0, 3.0], [2.0, 2.0, 6.0, 8.0]])
        if step == 1:
            box[2] = torch.tensor([6.0, 2.0, 2.0, 8.0])
        return {"x": randn(3, 3, seed=step), "box": box}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        size = b["box"][:, 2:] - b["box"][:, :2]
        keep = (size > 0).all(1) if fixed else torch.ones(len(size), dtype=torch.bool)
        return F.smooth_l1_loss(model(b["x"])[keep], torch.log(size[keep] / 4.0))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#1620",
    "summerlvsong/Aggregation-Cross-Entropy#2",
    "RasmussenLab/vamb#12",
    expected=Expected(step=0, phase="loss", op="aten.log", event="inf", loss_finite=True),
    accepted=("SG202",),
)
def log_of_softmax_underflow(fixed: bool) -> Scene:
    """log(softmax(x)): a class underflows to 0. It is not the label, so the loss is finite and
    backward is 0 * inf.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(60 * torch.eye(3))

    def batch(step: int) -> Batch:
        return {"x": torch.eye(3), "y": torch.tensor([0, 1, 2])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        logits = model(b["x"] * 2)
        log_p = F.log_softmax(logits, -1) if fixed else torch.log(F.softmax(logits, -1))
        return -log_p.gather(1, b["y"][:, None]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=1)


class Blur(nn.Module):
    """erf of an inverse width, as anti-aliased radiance fields weigh their samples."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def forward(self, width: Tensor) -> Tensor:
        if self.safe:
            return torch.erf(1 / (math.sqrt(8.0) * width.abs().clamp_min(1e-6)))
        return torch.erf(1 / torch.sqrt(8 * width**2))


class BlurNet(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.scale, self.weight, self.out = (
            nn.Linear(3, 4, bias=False),
            Blur(safe=safe),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.weight(self.scale(x)))


@incident(
    "SuLvXiangXin/zipnerf-pytorch#54",
    expected=Expected(
        step=1,
        phase="forward",
        module="weight",
        op="aten.reciprocal",
        event="inf",
        sample=0,
        loss_finite=True,
    ),
    accepted=("SG403",),
)
def transient_inf_absorbed_forward(fixed: bool) -> Scene:
    """1 / 0 is swallowed by erf, which gives 1; the backward multiplies the infinity by 0."""
    torch.manual_seed(0)
    model = BlurNet(safe=fixed)

    def batch(step: int) -> Batch:
        x = randn(3, 3, seed=step)
        if step == 1:
            x[0] = 0
        return {"x": x, "y": randn(3, 1, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

"""Faults in the loss: rendering, a criterion made of modules, losses that depend on another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd


@incident(
    "SuLvXiangXin/zipnerf-pytorch#54",
    expected=Expected(
        step=1, phase="loss", op="aten.div", event="nan", sample=3, grads_finite=True
    ),
    accepted=("SG201", "SG102"),
)
def expected_depth_of_an_empty_ray(fixed: bool) -> Scene:
    """Volume rendering divides depth by accumulated opacity, which is 0 for a ray through empty
    space.
    """
    torch.manual_seed(0)
    model = chain(density=nn.Linear(3, 1), act=nn.ReLU())
    with torch.no_grad():
        model.density.weight.fill_(1.0)
        model.density.bias.fill_(0.5)

    def batch(step: int) -> Batch:
        points = randn(4, 6, 3, seed=step).abs()
        if step == 1:
            points[3] = -2.0
        return {"points": points, "depth": randn(4, seed=step + 1).abs()}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        alpha = 1 - torch.exp(-model(b["points"])[..., 0])
        passed = torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha], -1), -1)[:, :-1]
        weights = alpha * passed
        total = weights.sum(-1)
        depth = (weights * torch.arange(6.0)).sum(-1) / (total.clamp_min(1e-6) if fixed else total)
        return F.l1_loss(depth, b["depth"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "pytorch/pytorch#46849",
    expected=Expected(
        step=1,
        phase="backward",
        module="criterion.distance",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=0,
        loss_finite=True,
    ),
    accepted=("SG401",),
)
def nested_criterion_with_clipping(fixed: bool) -> Scene:
    """A criterion made of modules; a perfect prediction has distance 0, and clipping turns the Inf
    into NaN.
    """
    torch.manual_seed(0)

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            eps = 1e-9 if fixed else 0.0
            self.distance = Lambda(lambda a, b: torch.sqrt((a - b).pow(2).sum(-1) + eps))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.distance(a, b).mean()

    model, criterion = nn.Linear(3, 2, bias=False), Criterion()

    def batch(step: int) -> Batch:
        data = regression(step, outputs=2)
        if step == 1:
            data["x"][0], data["y"][0] = 0.0, 0.0
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["y"])

    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model), clip=1.0
    )


@incident(
    "pytorch/pytorch#46849",
    expected=Expected(step=0, phase="loss", op="aten.reciprocal", event="inf"),
    accepted=("SG201",),
)
def perplexity_weight_of_a_perfect_batch(fixed: bool) -> Scene:
    """Two losses in one: the second is divided by the first, which is 0 on memorised data."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)

    def batch(step: int) -> Batch:
        return {"x": randn(4, 3, seed=step), "y": torch.zeros(4, 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        fit = mse(model, b)
        return fit + 0.1 / (fit.detach() + (1e-3 if fixed else 0.0)) * model.weight.pow(
            2
        ).sum().add(1.0)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)

"""Bad values in the batch itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, chain, randn, regression, sgd


@incident(
    "unit8co/darts#1977",
    "unit8co/darts#1438",
    "unit8co/darts#2100",
    expected=Expected(
        step=2, phase="input", module="fc1", op="aten.addmm", event="batch:x", sample=3
    ),
    accepted=("SG101",),
)
def nan_feature_in_one_sample(fixed: bool) -> Scene:
    """One cell of one sample is NaN: a rolling mean, a missing value."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(4, 6), act=nn.ReLU(), fc2=nn.Linear(6, 1))

    def batch(step: int) -> Batch:
        data = regression(step, count=5, features=4)
        if step == 2 and not fixed:
            data["x"][3, 1] = NAN
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=3)


@incident(
    "ecmwf/WeatherGenerator#2724",
    "NVIDIA/Megatron-LM#780",
    expected=Expected(
        step=1, phase="input", module="", op="aten.addmm", event="batch:x", micro=1, sample=2
    ),
    accepted=("SG101", "SG701"),
)
def one_rank_poisons_all_reduce(fixed: bool) -> Scene:
    """Two simulated data-parallel ranks whose gradients are averaged: the bad shard of one ruins
    both.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> list[Batch]:
        shards = [
            {"x": randn(4, 3, seed=10 * step + r), "y": randn(4, 1, seed=r + 1)} for r in range(2)
        ]
        if step == 1:
            shards[1]["x"][2, 0] = 0.0 if fixed else INF
        return shards

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"]) / 2

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

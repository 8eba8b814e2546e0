"""Values that are selected away or absorbed in forward and come back in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.log_and_root_domains import eye_linear
from zoo.scenes.parts import NAN, Lambda, chain, randn, regression, sgd


@incident(
    "pytorch/pytorch#23395",
    "pytorch/pytorch#68425",
    expected=Expected(
        step=1,
        phase="backward",
        module="ratio",
        op="aten.div",
        node="DivBackward0",
        event="seen",
        sample=2,
        loss_finite=True,
        proof={"transient": ("aten.div", "ratio")},
    ),
    accepted=("SG402",),
)
def where_division_unselected(fixed: bool) -> Scene:
    """where(b != 0, a / b, 0): the gradient of a is 0 / 0 where b is 0."""
    torch.manual_seed(0)

    class Ratio(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            above, below = x.chunk(2, -1)
            safe = torch.where(below != 0, below, torch.ones_like(below)) if fixed else below
            return torch.where(below != 0, above / safe, torch.zeros_like(above))

    model = chain(inp=nn.Linear(2, 4, bias=False), ratio=Ratio(), out=nn.Linear(2, 1))

    def batch(step: int) -> Batch:
        data = regression(step, features=2)
        if step == 1:
            data["x"][2] = 0
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-4))


@incident(
    "pytorch/pytorch#52248",
    expected=Expected(
        step=1,
        phase="backward",
        op="aten.div",
        node="LogBackward0",
        event="nan",
        sample=1,
        loss_finite=True,
    ),
    accepted=("SG402",),
)
def masked_fill_after_log(fixed: bool) -> Scene:
    """log(p) with the impossible entries filled afterwards: their gradient is 0 / 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 6, bias=False)

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[1] = 0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        p = model(b["x"]).abs()
        dead = p == 0
        log_p = torch.log(p.masked_fill(dead, 1.0) if fixed else p)
        return log_p.masked_fill(dead, 0.0).pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))


@incident(
    "pytorch/pytorch#23395",
    expected=Expected(
        step=0,
        phase="backward",
        op="aten.div",
        node="SqrtBackward0",
        event="seen",
        loss_finite=True,
    ),
    accepted=("SG402",),
)
def boolean_index_after_sqrt(fixed: bool) -> Scene:
    """sqrt(x)[x > 0]: choosing the good ones after the root does not keep the others out of the
    backward.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        good = out > 0
        return (torch.sqrt(out[good]) if fixed else torch.sqrt(out)[good]).mean()

    return Scene(model=model, batch=regression, loss=loss, optimizer=sgd(model, 1e-3), steps=1)


@incident(
    "rail-berkeley/softlearning#136",
    "ray-project/ray#14878",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=3, loss_finite=True),
    accepted=("SG403", "SG202"),
)
def clamp_after_log(fixed: bool) -> Scene:
    """log(1 - tanh(x) ** 2) clamped at -20: the clamp repairs the loss, not the gradient."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = randn(4, 2, seed=step)
        if step == 1:
            x[3, 0] = 30.0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        rest = 1 - torch.tanh(model(b["x"])).pow(2)
        return torch.log(rest.clamp_min(1e-9) if fixed else rest).clamp_min(-20).sum(-1).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    "choosehappy/QuickAnnotator#129",
    expected=Expected(
        step=1,
        phase="forward",
        module="unit",
        op="aten.div",
        event="nan",
        sample=0,
        loss_finite=True,
    ),
    accepted=("SG201", "SG402", "SG403"),
)
def nan_to_num_after_normalisation(fixed: bool) -> Scene:
    """nan_to_num(x / |x|): the forward is patched, the backward still divides by 0."""
    torch.manual_seed(0)

    def unit(x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        return x / norm.clamp_min(1e-6) if fixed else torch.nan_to_num(x / norm)

    model = chain(inp=nn.Linear(3, 4, bias=False), unit=Lambda(unit), out=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1:
            data["x"][0] = 0
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-4))


@incident(
    "unit8co/darts#1739",
    expected=Expected(step=1, phase="input", op="aten.mse_loss", event="batch:y", sample=2),
    accepted=("SG101",),
)
def missing_target_times_zero(fixed: bool) -> Scene:
    """Missing targets are NaN under a mask of 0, and the loss is multiplied by it: NaN * 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        data = regression(step, outputs=2)
        data["mask"] = torch.ones(4, 2)
        if step == 1:
            data["y"][2, 1], data["mask"][2, 1] = (0.0 if fixed else NAN), 0.0
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (F.mse_loss(model(b["x"]), b["y"], reduction="none") * b["mask"]).sum() / b[
            "mask"
        ].sum()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "kornia/kornia#918",
    "pytorch/pytorch#156212",
    expected=Expected(
        step=0,
        phase="backward",
        module="tone",
        op="aten.pow",
        node="PowBackward0",
        event="seen",
        loss_finite=True,
        proof={"transient": ("aten.pow", "tone")},
    ),
    accepted=("SG402",),
)
def tone_curve_with_a_linear_toe(fixed: bool) -> Scene:
    """sRGB: where(x > 0.0031, 1.055 x ** (1 / 2.4) - 0.055, 12.92 x): the power of a negative pixel
    is NaN.
    """
    torch.manual_seed(0)

    def tone(x: Tensor) -> Tensor:
        power = (x.clamp_min(0.0031) if fixed else x) ** (1 / 2.4)
        return torch.where(x > 0.0031, 1.055 * power - 0.055, 12.92 * x)

    model = chain(render=nn.Linear(3, 6), tone=Lambda(tone), out=nn.Linear(6, 1))
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model, 1e-3), steps=1)


@incident(
    "pytorch/pytorch#1620",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=2, loss_finite=True),
    accepted=("SG202",),
)
def log_probability_of_unlabelled_class(fixed: bool) -> Scene:
    """NLL on log(softmax / temperature): another class underflows to 0, the label's own term is
    finite.
    """
    torch.manual_seed(0)
    model = eye_linear(size=3)

    def batch(step: int) -> Batch:
        x = randn(3, 3, seed=step)
        if step == 1:
            x[2] = torch.tensor([0.0, 0.0, 130.0])
        return {"x": x, "y": torch.tensor([0, 1, 2])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        log_p = F.log_softmax(out, -1) if fixed else torch.log(torch.softmax(out, -1))
        return F.nll_loss(log_p, b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))

"""Bad values from outside model and batch (numbers, tensors kept by a module), divisors that are no
counts, poles.

No public threads: the cases were written after such incidents had been given no cause, or the wrong
one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, Lambda, chain, randn, regression, sgd


def weighted(fixed: bool, bad: float) -> Scene:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    weights = iter((1.0, 0.0 if fixed else bad))
    weight = [1.0]

    def before_step(step: int) -> None:
        weight[0] = next(weights)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"]) * weight[0]

    return Scene(
        model=model, batch=regression, loss=loss, optimizer=sgd(model), before_step=before_step
    )


@incident(expected=Expected(step=1, phase="loss", op="aten.mul", event="seen"), accepted=("SG101",))
def loss_weight_is_nan(fixed: bool) -> Scene:
    """The weight of a loss comes from a metric of an empty epoch: 0 / 0 in Python."""
    return weighted(fixed, NAN)


@incident(
    expected=Expected(step=1, phase="loss", op="aten.mul", event="seen", grads_finite=False),
    accepted=("SG101",),
)
def loss_weight_is_infinite(fixed: bool) -> Scene:
    """1 / p of a class that was never seen, as a Python number."""
    return weighted(fixed, INF)


class Scaled(nn.Module):
    """Scores over a temperature that is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(3, 4)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.score(x)
        return scores / self.temperature


@incident(
    expected=Expected(step=1, phase="forward", module="", op="aten.div", event="seen"),
    accepted=("SG101",),
)
def temperature_is_nan(fixed: bool) -> Scene:
    """A schedule computed the temperature as inf - inf; the model keeps it as a number."""
    model = Scaled()

    def before_step(step: int) -> None:
        model.temperature = 1.0 if step == 0 or fixed else NAN

    def batch(step: int) -> Batch:
        return {"x": randn(4, 3, seed=step), "y": torch.tensor([0, 1, 2, 3])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), before_step=before_step)


class Centred(nn.Module):
    """Outputs around a centre that is a tensor but no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 1)
        self.centre = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(x)
        return out - self.centre


@incident(
    expected=Expected(step=1, phase="forward", module="head", op="aten.sub", event="seen"),
    accepted=("SG602",),
    guarded=Expected(step=1, phase="state", module="head", op="aten.sub", event="seen"),
)
def centre_that_is_no_buffer(fixed: bool) -> Scene:
    """self.centre of a teacher head has turned NaN; no checkpoint and no check of buffers knows of
    it.
    """
    torch.manual_seed(0)
    model = chain(head=Centred())

    def before_step(step: int) -> None:
        if step == 1:
            model.head.centre = torch.tensor([0.0 if fixed else NAN])

    return Scene(
        model=model, batch=regression, loss=mse, optimizer=sgd(model), before_step=before_step
    )


@incident(
    expected=Expected(step=1, phase="loss", op="aten.div", event="inf", sample=3),
    accepted=("SG201",),
)
def weight_by_log_of_length(fixed: bool) -> Scene:
    """A document's loss over the logarithm of its length: log(1) is 0, and no count."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        return {
            "x": randn(4, 3, seed=step),
            "length": torch.tensor([3, 8, 17, 1 if step == 1 else 5]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        length = b["length"].float()
        return (
            model(b["x"]).squeeze(-1).pow(2) / (torch.log1p(length) if fixed else torch.log(length))
        ).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


def zero_row(step: int) -> Batch:
    data = regression(step)
    if step == 1:
        data["x"][2] = 0
    return data


@incident(
    expected=Expected(step=1, phase="forward", module="norm", op="aten.div", event="nan", sample=2),
    accepted=("SG302",),
)
def root_mean_square_in_half(fixed: bool) -> Scene:
    """x / sqrt(mean(x * x) + 1e-8) in float16, where 1e-8 is 0; the root stands between epsilon and
    division.
    """
    torch.manual_seed(0)

    def norm(x: Tensor) -> Tensor:
        half = x.half()
        return (
            half / (half.pow(2).mean(-1, keepdim=True) + (1e-5 if fixed else 1e-8)).sqrt()
        ).float()

    model = chain(inp=nn.Linear(3, 4, bias=False), norm=Lambda(norm), out=nn.Linear(4, 1))
    return Scene(model=model, batch=zero_row, loss=mse, optimizer=sgd(model, 1e-3))


@incident(
    expected=Expected(
        step=1,
        phase="backward",
        module="length",
        op="aten.div",
        node="HypotBackward0",
        event="nan",
        sample=2,
        loss_finite=True,
    ),
    accepted=("SG401",),
)
def hypotenuse_of_nothing(fixed: bool) -> Scene:
    """hypot(0, 0) is 0 and has no slope."""
    torch.manual_seed(0)

    def length(x: Tensor) -> Tensor:
        return torch.hypot(x[:, :1], x[:, 1:] + (1e-3 if fixed else 0.0))

    model = chain(inp=nn.Linear(3, 2, bias=False), length=Lambda(length), out=nn.Linear(1, 1))
    return Scene(model=model, batch=zero_row, loss=mse, optimizer=sgd(model, 1e-3))


class Pool(nn.Module):
    """Generalised mean with a learned power."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(3.0))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + self.eps).pow(self.power).mean(-1, keepdim=True).pow(1 / self.power)


@incident(
    expected=Expected(
        step=1,
        phase="backward",
        module="pool",
        op="aten.pow",
        node="PowBackward1",
        event="seen",
        sample=2,
        loss_finite=True,
    ),
    accepted=("SG401",),
)
def generalised_mean_of_nothing(fixed: bool) -> Scene:
    """mean(x ** p) ** (1 / p) of a row of zeros."""
    torch.manual_seed(0)
    model = chain(
        inp=nn.Linear(3, 4, bias=False), pool=Pool(eps=1e-6 if fixed else 0.0), out=nn.Linear(1, 1)
    )
    return Scene(model=model, batch=zero_row, loss=mse, optimizer=sgd(model, 1e-4))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.reciprocal", event="inf", grads_finite=True),
    accepted=("SG201",),
)
def repulsion_of_twins(fixed: bool) -> Scene:
    """1 / distance over all pairs, and two samples are the same."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[2] = x[0]
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (1 / (F.pdist(model(b["x"])) + (1e-3 if fixed else 0.0))).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))

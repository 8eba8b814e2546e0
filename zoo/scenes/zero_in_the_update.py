"""The update itself: optimizers other than Adam, hand-written ones, and the state they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import NAN, chain, randn, regression, sgd

SEEN = {"loss_finite": True, "grads_finite": True}


def words() -> nn.Sequential:
    torch.manual_seed(0)
    return chain(emb=nn.Embedding(6, 4), head=nn.Linear(4, 2))


def word_batch(step: int) -> Batch:
    return {"ids": torch.tensor([[1, 2], [2, 3], [1, 3]][step % 3]), "y": torch.tensor([0, 1])}


def word_loss(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["ids"]), b["y"])


@incident(
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.addcdiv_",
        event="nan",
        proof={"param": "emb.weight"},
        **SEEN,
    ),
    accepted=("SG502",),
)
def adamax_without_epsilon(fixed: bool) -> Scene:
    """Words that the batch does not hold have gradient 0 and infinity norm 0."""
    model = words()
    optimizer = torch.optim.Adamax(
        model.parameters(), lr=1e-3, eps=1e-8 if fixed else 0.0, foreach=False
    )
    return Scene(model=model, batch=word_batch, loss=word_loss, optimizer=optimizer, steps=3)


@incident(
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.div_",
        event="nan",
        proof={"param": "emb.weight"},
        **SEEN,
    ),
    accepted=("SG502",),
)
def adadelta_without_epsilon(fixed: bool) -> Scene:
    """Adadelta divides one running square by another, and both are 0."""
    model = words()
    optimizer = torch.optim.Adadelta(
        model.parameters(), lr=1.0, eps=1e-6 if fixed else 0.0, foreach=False
    )
    return Scene(model=model, batch=word_batch, loss=word_loss, optimizer=optimizer, steps=3)


@incident(
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.addcdiv_",
        event="nan",
        proof={"param": "emb.weight"},
        **SEEN,
    ),
    accepted=("SG502",),
)
def nadam_without_epsilon(fixed: bool) -> Scene:
    """0 / 0 in both terms of the Nesterov step."""
    model = words()
    optimizer = torch.optim.NAdam(
        model.parameters(), lr=1e-3, eps=1e-8 if fixed else 0.0, foreach=False
    )
    return Scene(model=model, batch=word_batch, loss=word_loss, optimizer=optimizer, steps=3)


class TrustRatio(torch.optim.Optimizer):
    """LARS as people write it: the step is scaled by ||w|| / ||g||."""

    def __init__(self, params: Iterable[Tensor], lr: float, *, floor: float) -> None:
        super().__init__(params, {"lr": lr, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / (p.grad.norm() + group["floor"])
                p.sub_(group["lr"] * ratio * p.grad)


class LowRank(nn.Module):
    """A frozen layer with a low-rank update whose second factor starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 1).requires_grad_(False)
        self.down, self.up = nn.Parameter(randn(3, 2, seed=1)), nn.Parameter(torch.zeros(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


@incident(
    "cybertronai/pytorch-lamb#6",
    expected=Expected(
        step=0, phase="optimizer", op="aten.div", event="inf", proof={"param": "down"}, **SEEN
    ),
    accepted=("SG502", "SG201"),
)
def trust_ratio_of_a_fresh_adapter(fixed: bool) -> Scene:
    """The first factor gets gradient 0 as long as the second is 0: its trust ratio is ||w|| / 0."""
    torch.manual_seed(0)
    model = LowRank()
    trained = [model.down, model.up]
    optimizer = TrustRatio(trained, 1e-2, floor=1e-8 if fixed else 0.0)
    return Scene(model=model, batch=regression, loss=mse, optimizer=optimizer, steps=3)


class Sharpness(torch.optim.Optimizer):
    """A normalised gradient step over all parameters together."""

    def __init__(self, params: Iterable[Tensor], lr: float, *, floor: float) -> None:
        super().__init__(params, {"lr": lr, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in grads]).norm() + group["floor"]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


@incident(
    "google-deepmind/optax#1743",
    "kozistr/pytorch_optimizer#120",
    expected=Expected(step=2, phase="optimizer", op="aten.div", event="nan", **SEEN),
    accepted=("SG502", "SG201"),
)
def normalised_step_of_a_zero_gradient(fixed: bool) -> Scene:
    """The hinge of one batch is satisfied: the gradient is exactly 0 and g / ||g|| is NaN."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        b = regression(step)
        b["y"] = torch.full((4, 1), -100.0 if step == 2 else 100.0)
        return b

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.relu(model(b["x"]) + b["y"]).mean()

    optimizer = Sharpness(model.parameters(), 1e-2, floor=1e-8 if fixed else 0.0)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=4)


@incident(
    "facebookresearch/svoice#22",
    expected=Expected(
        step=2, phase="optimizer", op="aten.mul_", event="opt:momentum_buffer", **SEEN
    ),
    accepted=("SG503",),
)
def momentum_restored_with_nan(fixed: bool) -> Scene:
    """The weights of the checkpoint are fine, the momentum buffer beside them is not."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model, momentum=0.9)

    def before(step: int) -> None:
        if step == 2 and not fixed:
            state = optimizer.state_dict()
            state["state"][0]["momentum_buffer"] = torch.full((1, 3), NAN)
            optimizer.load_state_dict(state)

    return Scene(
        model=model, batch=regression, loss=mse, optimizer=optimizer, steps=4, before_step=before
    )


@incident(
    expected=Expected(
        step=2, phase="optimizer", op="aten.maximum", event="opt:max_exp_avg_sq", **SEEN
    ),
    accepted=("SG503",),
)
def amsgrad_maximum_restored_with_nan(fixed: bool) -> Scene:
    """AMSGrad keeps the largest second moment for ever, so a NaN in it never leaves."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, foreach=False)

    def before(step: int) -> None:
        if step == 2 and not fixed:
            state = optimizer.state_dict()
            state["state"][1]["max_exp_avg_sq"] = torch.full((1,), NAN)
            optimizer.load_state_dict(state)

    return Scene(
        model=model, batch=regression, loss=mse, optimizer=optimizer, steps=4, before_step=before
    )


@incident(
    expected=Expected(step=0, slack=30, phase="optimizer", event="spike", **SEEN),
    accepted=("SG505",),
)
def nesterov_with_a_rate_for_plain_descent(fixed: bool) -> Scene:
    """A rate that plain descent bears; momentum 0.99 multiplies it by a hundred."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model, 0.005 if fixed else 2.5, momentum=0.99, nesterov=True)
    return Scene(
        model=model,
        batch=lambda step: regression(0, count=8),
        loss=mse,
        optimizer=optimizer,
        steps=40,
    )


@incident(
    expected=Expected(step=30, slack=5, phase="optimizer", event="spike", **SEEN),
    accepted=("SG504",),
)
def rate_of_one_group_in_the_wrong_unit(fixed: bool) -> Scene:
    """After 30 steps the backbone is unfrozen with a rate of 50 instead of 0.005; the head keeps
    its own.
    """
    torch.manual_seed(0)
    model = chain(body=nn.Linear(3, 4), head=nn.Linear(4, 1))
    optimizer = torch.optim.SGD(
        [
            {"params": model.head.parameters(), "lr": 0.05},
            {"params": model.body.parameters(), "lr": 0.0},
        ]
    )

    def before(step: int) -> None:
        if step == 30:
            optimizer.param_groups[1]["lr"] = 0.005 if fixed else 50.0

    return Scene(
        model=model,
        batch=lambda step: regression(step, count=16),
        loss=mse,
        optimizer=optimizer,
        steps=50,
        before_step=before,
    )

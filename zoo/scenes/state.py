"""Parameters, buffers and optimizer state that are bad before a step, or are left bad after one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, chain, randn, regression, sgd, uninitialised

LABELS = torch.tensor([0, 1, 0, 1, 0, 1])


class Background(nn.Module):
    """A learned background token that nobody initialises."""

    def __init__(self, token: Tensor) -> None:
        super().__init__()
        self.lin, self.bg = nn.Linear(3, 4), nn.Parameter(token)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.lin(x), self.bg]) @ torch.ones(4, 1)


@incident(
    "sauradip/STALE#16",
    "gordicaleksa/pytorch-GAT#11",
    "kmkurn/pytorch-crf#1",
    expected=Expected(step=0, phase="state", module="", op="aten.cat", event="param:bg"),
    accepted=("SG601",),
)
def uninitialised_parameter(fixed: bool) -> Scene:
    """nn.Parameter(torch.empty(...)): garbage or NaN, fine on some runs."""
    torch.manual_seed(0)
    model = Background(torch.full((1, 4), 0.1) if fixed else uninitialised(1, 4))

    def batch(step: int) -> Batch:
        return {"x": randn(3, 3, seed=step), "y": randn(4, 1, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=1)


def normalised_net() -> nn.Module:
    torch.manual_seed(0)
    return chain(lin=nn.Linear(3, 4), bn=nn.BatchNorm1d(4), head=nn.Linear(4, 2))


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def evaluate(model: nn.Module) -> Tensor:
    return model(randn(2, 3, seed=5))


@incident(
    "pytorch/pytorch#10008",
    "facebookresearch/SparseConvNet#190",
    expected=Expected(
        step=0,
        phase="state",
        module="bn",
        op="aten.native_batch_norm",
        event="buffer:bn.running_var",
        loss_finite=True,
        grads_finite=True,
        proof={"eval_finite": False},
    ),
    accepted=("SG602",),
)
def bn_running_var_nan_in_checkpoint(fixed: bool) -> Scene:
    """A loaded checkpoint has NaN in running_var: training looks perfect, evaluation is NaN."""
    model = normalised_net()
    if not fixed:
        model.load_state_dict(
            model.state_dict() | {"bn.running_var": torch.tensor([1.0, NAN, 1.0, 1.0])}
        )

    def batch(step: int) -> Batch:
        return {"x": randn(6, 3, seed=step), "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), evaluate=evaluate)


@incident(
    "pytorch/pytorch#1206",
    expected=Expected(
        step=1,
        phase="input",
        module="lin",
        op="aten.addmm",
        event="batch:x",
        sample=4,
        proof={"poisoned": ["bn.running_mean", "bn.running_var"], "eval_finite": False},
    ),
    accepted=("SG101",),
)
def bn_stats_poisoned_by_skipped_batch(fixed: bool) -> Scene:
    """The loop skips the update of a NaN batch, but the running statistics have absorbed it."""
    model = normalised_net()

    def batch(step: int) -> Batch:
        x = randn(6, 3, seed=step)
        if step == 1:
            x[4, 0] = NAN
        return {"x": x, "y": LABELS}

    return Scene(
        model=model,
        batch=batch,
        loss=classify,
        optimizer=sgd(model),
        steps=4,
        skips="restore" if fixed else "skip",
        evaluate=evaluate,
        tolerated=(1,),
    )


@incident(
    "facebookresearch/maskrcnn-benchmark#464",
    "Project-MONAI/monai-physio#137",
    expected=Expected(
        step=2,
        phase="optimizer",
        op="aten.lerp_",
        event="opt:exp_avg",
        loss_finite=True,
        grads_finite=True,
    ),
    accepted=("SG101",),
    guarded=Expected(step=1, phase="input", event="batch:x", sample=0),
)
def adam_state_poisoned_after_weight_restore(fixed: bool) -> Scene:
    """After a NaN step only the weights are put back; exp_avg stays NaN and the next clean step is
    NaN again.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    saved: dict[str, Any] = {}

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1:
            data["x"][0, 0] = NAN
        return data

    def before(step: int) -> None:
        if step == 1:
            saved["model"] = {k: v.clone() for k, v in model.state_dict().items()}
            saved["optimizer"] = copy.deepcopy(optimizer.state_dict())

    def after(step: int) -> None:
        if step == 1:
            model.load_state_dict(saved["model"])
            if fixed:
                optimizer.load_state_dict(saved["optimizer"])

    return Scene(
        model=model,
        batch=batch,
        loss=mse,
        optimizer=optimizer,
        steps=3,
        before_step=before,
        after_step=after,
        tolerated=(1,),
    )


@incident(
    "getainode/ainode#186",
    "kohya-ss/sd-scripts#201",
    "ludwig-ai/ludwig#3740",
    expected=Expected(
        step=1,
        phase="checkpoint",
        event="checkpoint",
        sample=0,
        proof={"bad_entries": ["a.weight", "a.bias", "b.weight", "b.bias"]},
    ),
    accepted=("SG101",),
)
def nan_weights_saved_as_checkpoint(fixed: bool) -> Scene:
    """Training went NaN at step 1, and the loop still writes its final checkpoint."""
    torch.manual_seed(0)
    model = chain(a=nn.Linear(3, 4), b=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1 and not fixed:
            data["x"][0, 0] = INF
        return data

    def save() -> dict[str, Tensor]:
        return {k: v.clone() for k, v in model.state_dict().items()}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=3, save=save)

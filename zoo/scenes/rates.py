"""Learning rates: a jump after a resume, and one above the stability limit."""

from __future__ import annotations

import torch
from torch import nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import chain, randn, sgd


def teacher_batch(step: int) -> Batch:
    """A linear teacher in eight features."""
    x = randn(16, 8, seed=step)
    return {"x": x, "y": x @ randn(8, 1, seed=99)}


def student() -> nn.Module:
    torch.manual_seed(0)
    return chain(fc1=nn.Linear(8, 32), act=nn.ReLU(), fc2=nn.Linear(32, 1))


RUNAWAY = {
    "phase": "optimizer",
    "op": "aten.add_",
    "event": "spike",
    "loss_finite": True,
    "grads_finite": True,
}


@incident(
    "ultralytics/yolov5#292",
    "torch-points3d/torch-points3d#630",
    "D-X-Y/NAS-Bench-201#19",
    expected=Expected(step=5, **RUNAWAY),
    accepted=("SG504",),
)
def lr_spike_after_resume(fixed: bool) -> Scene:
    """A resume at step 5 builds the optimizer with the undecayed rate: 400 times too high."""
    model = student()
    optimizer = sgd(model, 0.01, momentum=0.9)

    def before(step: int) -> None:
        if step == 5 and not fixed:
            optimizer.param_groups[0]["lr"] = 4.0

    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=optimizer,
        steps=14,
        before_step=before,
    )


@incident(
    "facebookresearch/detectron2#1128",
    "karpathy/nanoGPT#136",
    "facebookresearch/fairseq#282",
    expected=Expected(step=0, slack=5, **RUNAWAY),
    accepted=("SG505",),
)
def lr_too_high_divergence(fixed: bool) -> Scene:
    """A constant rate above the stability limit: the loss grows for several steps before the first
    Inf.
    """
    model = student()
    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=sgd(model, 0.02 if fixed else 0.8),
        steps=14,
    )

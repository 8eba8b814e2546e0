"""Damage by an update or a load: weights that explode, state replaced in mid-run."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import NAN, chain, regression, sgd
from zoo.scenes.rates import RUNAWAY, student, teacher_batch


@incident(
    "facebookresearch/detectron2#1128",
    expected=Expected(step=0, **RUNAWAY),
    accepted=("SG505",),
)
def rate_without_its_exponent(fixed: bool) -> Scene:
    """lr: 1e12 by a slip in a configuration: the very next loss is infinite."""
    model = student()
    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=sgd(model, 1e-2 if fixed else 1e12),
        steps=4,
    )


@incident(
    "ultralytics/yolov5#292",
    expected=Expected(step=4, **RUNAWAY),
    accepted=("SG504",),
)
def rate_jumps_until_nothing_fits(fixed: bool) -> Scene:
    """A schedule bug multiplies the rate by 1e13 at step 4: weights stay finite, every loss after
    it is not.
    """
    model = student()
    optimizer = sgd(model, 0.01)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e11 if step == 4 and not fixed else 0.01

    return Scene(
        model=model, batch=teacher_batch, loss=mse, optimizer=optimizer, steps=8, before_step=before
    )


@incident(
    "karpathy/nanoGPT#136",
    expected=Expected(step=0, **RUNAWAY),
    accepted=("SG505",),
)
def classifier_rate_too_high(fixed: bool) -> Scene:
    """Cross-entropy of a deep linear stack under SGD, lr 50: logits of 1e30 in three steps."""
    torch.manual_seed(0)
    model = chain(a=nn.Linear(8, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 4))

    def batch(step: int) -> Batch:
        data = teacher_batch(step)
        return {
            "x": data["x"],
            "y": (data["y"][:, 0] > 0).long() + 2 * (data["x"][:, 0] > 0).long(),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(
        model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.05 if fixed else 50.0), steps=8
    )


@incident(
    "facebookresearch/maskrcnn-benchmark#464",
    expected=Expected(
        step=2, phase="state", event="param:fc1.weight", op="aten.addmm", module="fc1"
    ),
    accepted=("SG601",),
)
def bad_weights_loaded_in_mid_run(fixed: bool) -> Scene:
    """A callback reloads 'the best' weights at step 2, and that file holds NaN."""
    model = student()
    poisoned = copy.deepcopy(model.state_dict())
    poisoned["fc1.weight"][0, 0] = 0.0 if fixed else NAN

    def before(step: int) -> None:
        if step == 2:
            model.load_state_dict(poisoned)

    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=sgd(model),
        steps=3,
        before_step=before,
    )


@incident(
    "afiaka87/glide-finetune#5",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.add_",
        event="inf",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "weight"},
    ),
    accepted=("SG301", "SG505"),
)
def half_precision_weights_overflow_in_the_update(fixed: bool) -> Scene:
    """fp16 weights under SGD with weight decay off: a gradient of 3e4 times lr 4 exceeds 65504."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    model = model if fixed else model.half()

    def batch(step: int) -> Batch:
        return {"x": torch.ones(1, 2).to(model.weight.dtype)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (model(b["x"]) * 3.0e4).sum()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 4.0), steps=1)


@incident(
    "facebookresearch/svoice#22",
    expected=Expected(
        step=2,
        phase="optimizer",
        op="aten.lerp_",
        event="opt:exp_avg",
        loss_finite=True,
        grads_finite=True,
    ),
    accepted=("SG503",),
)
def moments_loaded_with_nan(fixed: bool) -> Scene:
    """optimizer.load_state_dict in mid-run brings moments of a run that had diverged."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][0]["exp_avg"][0, 0] = 0.0 if fixed else NAN
            optimizer.load_state_dict(state)

    return Scene(
        model=model, batch=regression, loss=mse, optimizer=optimizer, steps=4, before_step=before
    )

"""Step sizes: schedules that never end, decay that multiplies, data that is not scaled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import chain, generator, randn, sgd, tokens
from zoo.scenes.rates import RUNAWAY, student, teacher_batch


@incident(
    "mlcommons/hpc#27",
    "Nerogar/OneTrainer#253",
    expected=Expected(
        step=3,
        phase="optimizer",
        op="aten.add_",
        event="seen",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "fc1.weight"},
    ),
    accepted=("SG504",),
)
def schedule_divides_by_zero_warmup(fixed: bool) -> Scene:
    """A schedule in numpy computes 0 / 0 once the warm-up of 0 steps is over: the rate is NaN."""
    model = student()
    optimizer = sgd(model, 0.01)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 if step != 3 or fixed else float("nan")

    return Scene(
        model=model, batch=teacher_batch, loss=mse, optimizer=optimizer, steps=5, before_step=before
    )


@incident(
    "mlcommons/hpc#27",
    expected=Expected(
        step=2,
        phase="optimizer",
        op="aten.addcdiv_",
        event="seen",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "fc1.weight"},
    ),
    accepted=("SG504",),
)
def nan_rate_under_adam(fixed: bool) -> Scene:
    """The same under Adam, whose moments stay finite while every weight turns NaN."""
    model = student()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 if step != 2 or fixed else float("nan")

    return Scene(
        model=model, batch=teacher_batch, loss=mse, optimizer=optimizer, steps=4, before_step=before
    )


@incident(
    "YunYang1994/TensorFlow2.0-Examples#8",
    expected=Expected(step=6, slack=4, **RUNAWAY),
    accepted=("SG504", "SG505"),
)
def warmup_that_never_ends(fixed: bool) -> Scene:
    """The warm-up counts epochs as steps: the rate grows threefold a step past its peak."""
    model = student()
    optimizer = sgd(model, 0.001)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.001 * 3.0 ** (min(step, 2) if fixed else step)

    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=optimizer,
        steps=14,
        before_step=before,
    )


@incident(
    "karpathy/nanoGPT#136",
    expected=Expected(step=0, slack=5, **RUNAWAY),
    accepted=("SG505",),
)
def weight_decay_above_two(fixed: bool) -> Scene:
    """lr * weight_decay = 4: the decay multiplies every weight by -3 in each step."""
    model = student()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1 if fixed else 400.0)
    return Scene(model=model, batch=teacher_batch, loss=mse, optimizer=optimizer, steps=16)


@incident(
    "facebookresearch/fairseq#282",
    expected=Expected(step=0, slack=5, **RUNAWAY),
    accepted=("SG505",),
)
def summed_loss_instead_of_mean(fixed: bool) -> Scene:
    """reduction="sum" over 16 samples with the rate of a mean: every step is 16 times too long."""
    model = student()

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"], reduction="mean" if fixed else "sum")

    return Scene(model=model, batch=teacher_batch, loss=loss, optimizer=sgd(model, 0.05), steps=12)


@incident(
    "facebookresearch/detectron2#1128",
    expected=Expected(step=0, slack=5, **RUNAWAY),
    accepted=("SG505", "SG103"),
)
def images_from_0_to_255(fixed: bool) -> Scene:
    """Pixels are not divided by 255: activations and steps are ten thousand times too large."""
    torch.manual_seed(0)
    model = chain(
        conv=nn.Conv2d(1, 4, 3), act=nn.LeakyReLU(0.5), flat=nn.Flatten(), head=nn.Linear(64, 1)
    )

    def batch(step: int) -> Batch:
        pixels = torch.randint(0, 256, (8, 1, 6, 6), generator=generator(step)).float()
        return {"x": pixels / 255 if fixed else pixels, "y": randn(8, 1, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-2), steps=10)


@incident(
    "ultralytics/yolov5#292",
    "D-X-Y/NAS-Bench-201#19",
    expected=Expected(step=20, **RUNAWAY),
    accepted=("SG504",),
)
def adam_rate_restored_thousandfold(fixed: bool) -> Scene:
    """A resume reads lr=3e-3 as 30: Adam moves every weight by 30 a step."""
    model = student()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 30.0 if step >= 20 and not fixed else 1e-3

    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=optimizer,
        steps=26,
        before_step=before,
    )


@incident(
    "karpathy/nanoGPT#136",
    expected=Expected(step=0, slack=8, **RUNAWAY),
    accepted=("SG505",),
)
def momentum_at_its_limit(fixed: bool) -> Scene:
    """momentum=0.99 with a rate that is stable without it: the velocity amplifies itself."""
    model = student()
    optimizer = sgd(model, 0.01 if fixed else 0.3, momentum=0.5 if fixed else 0.99)
    return Scene(model=model, batch=teacher_batch, loss=mse, optimizer=optimizer, steps=14)


@incident(
    "facebookresearch/fairseq#2384",
    "deepmodeling/deepmd-kit#5519",
    expected=Expected(
        step=1,
        phase="optimizer",
        op="aten._foreach_norm",
        event="inf",
        loss_finite=True,
        grads_finite=True,
    ),
    accepted=("SG501",),
)
def language_model_gradients_beyond_the_norm(fixed: bool) -> Scene:
    """A loss divided by a perplexity of almost 0 gives gradients near 1e22: finite, but not their
    norm.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(8, 6), flat=nn.Flatten(), head=nn.Linear(18, 8))
    dial = {"scale": 1.0}

    def before(step: int) -> None:
        dial["scale"] = 1e22 if step == 1 and not fixed else 1.0

    def batch(step: int) -> Batch:
        return {"ids": tokens(4, 3, seed=step), "y": tokens(4, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]), b["y"]) * dial["scale"]

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model),
        steps=3,
        clip=1.0,
        before_step=before,
    )

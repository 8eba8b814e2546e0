"""Bad batches: in targets, weights, masks, sequences, and in one of several micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, chain, randn, regression, sgd

LABELS = torch.tensor([0, 1, 0, 1])


@incident(
    "unit8co/darts#1438",
    expected=Expected(step=1, phase="input", op="aten.huber_loss", event="batch:y", sample=3),
    accepted=("SG101",),
)
def target_is_nan(fixed: bool) -> Scene:
    """A label of a missing measurement was left in."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(3, 6), act=nn.GELU(), fc2=nn.Linear(6, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1 and not fixed:
            data["y"][3] = NAN
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.huber_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class SequenceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@incident(
    "unit8co/darts#1977",
    expected=Expected(step=2, phase="input", event="batch:x", sample=0),
    accepted=("SG101",),
)
def gap_in_a_sequence(fixed: bool) -> Scene:
    """One time step of one sequence is NaN: the LSTM carries it to the end."""
    torch.manual_seed(0)
    model = SequenceModel()

    def batch(step: int) -> Batch:
        x = randn(4, 5, 3, seed=step)
        if step == 2 and not fixed:
            x[0, 2, 1] = NAN
        return {"x": x, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@incident(
    "open-mmlab/mmdetection#3397",
    expected=Expected(step=1, phase="input", op="aten.mul", event="batch:weight", sample=2),
    accepted=("SG101",),
)
def infinite_sample_weight(fixed: bool) -> Scene:
    """Importance weights 1 / p with p = 0 were computed by the data pipeline."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), act=nn.ReLU(), fc2=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        data["weight"] = torch.ones(4, 1)
        if step == 1 and not fixed:
            data["weight"][2] = INF
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (F.mse_loss(model(b["x"]), b["y"], reduction="none") * b["weight"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "NVIDIA/Megatron-LM#780",
    expected=Expected(
        step=1, phase="input", module="fc1", op="aten.addmm", event="batch:x", sample=1, micro=3
    ),
    accepted=("SG101",),
)
def last_micro_batch_is_bad(fixed: bool) -> Scene:
    """Four accumulated micro-batches, the last one with a corrupt row: three good gradients are
    lost with it.
    """
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(3, 4), drop=nn.Dropout(0.2), fc2=nn.Linear(4, 1))

    def batch(step: int) -> list[Batch]:
        micros = [regression(10 * step + k) for k in range(4)]
        if step == 1 and not fixed:
            micros[3]["x"][1, 2] = NAN
        return micros

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"]) / 4

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "ecmwf/WeatherGenerator#2724",
    expected=Expected(step=1, phase="loss", op="aten.sqrt", event="nan", micro=1, sample=0),
    accepted=("SG207", "SG104"),
)
def negative_rainfall_in_second_micro_batch(fixed: bool) -> Scene:
    """Rain is learned on a root scale; a retrieval error gave -0.3 mm in the second micro-batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> list[Batch]:
        micros = [regression(10 * step + k) for k in range(2)]
        for micro in micros:
            micro["y"] = micro["y"].abs()
        if step == 1:
            micros[1]["y"][0] = -0.3
        return micros

    def loss(model: nn.Module, b: Batch) -> Tensor:
        rain = b["y"].clamp_min(0) if fixed else b["y"]
        return F.mse_loss(model(b["x"]), torch.sqrt(rain))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "ludwig-ai/ludwig#3740",
    expected=Expected(step=1, phase="input", module="conv", event="batch:x", sample=2),
    accepted=("SG101",),
)
def corrupt_image_decodes_to_nan(fixed: bool) -> Scene:
    """A truncated float image holds NaN in a corner, and max pooling would hide it from a mean."""
    torch.manual_seed(0)
    model = chain(
        conv=nn.Conv2d(1, 4, 3),
        norm=nn.BatchNorm2d(4),
        act=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        head=nn.Linear(16, 2),
    )

    def batch(step: int) -> Batch:
        x = randn(4, 1, 6, 6, seed=step)
        if step == 1 and not fixed:
            x[2, 0, 0, 0] = NAN
        return {"x": x, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@incident(
    "unit8co/darts#2100",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan", sample=1),
    accepted=("SG201", "SG104"),
)
def percentage_error_of_zero_target(fixed: bool) -> Scene:
    """Mean absolute percentage error: |y - f| / |y| with y = 0, and the prediction 0 as well."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)

    def batch(step: int) -> Batch:
        data = regression(step)
        data["y"] = data["y"].abs() + 0.5
        if step == 1:
            data["x"][1], data["y"][1] = 0.0, 0.0
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scale = b["y"].abs()
        return ((b["y"] - model(b["x"])).abs() / (scale.clamp_min(1e-3) if fixed else scale)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "unit8co/darts#1977",
    expected=Expected(
        step=3, phase="input", module="fc1", op="aten.addmm", event="batch:x", sample=0
    ),
    accepted=("SG101",),
)
def bad_row_under_adam_with_clipping(fixed: bool) -> Scene:
    """NaN gradients pass clip_grad_norm_ and poison Adam's moments for good."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(3, 4), act=nn.Tanh(), fc2=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 3 and not fixed:
            data["x"][0] = NAN
        return data

    return Scene(
        model=model,
        batch=batch,
        loss=mse,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=5,
        clip=1.0,
    )

"""Means over nothing and statistics of one element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import NAN, chain, randn, regression, sgd, tokens


@incident(
    "JJBOY/BMN-Boundary-Matching-Network#22",
    expected=Expected(step=2, phase="loss", op="aten.mean", event="nan", grads_finite=True),
    accepted=("SG102",),
)
def mean_of_empty_selection(fixed: bool) -> Scene:
    """Hard examples are selected by a threshold; in one batch there are none."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        data = regression(step)
        data["hard"] = torch.tensor([True, False, True, False]) & torch.tensor(step != 2)
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        each = F.mse_loss(model(b["x"]), b["y"], reduction="none")[b["hard"]]
        return each.sum() / max(len(each), 1) if fixed else each.mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@incident(
    "DLR-RM/stable-baselines3#325",
    "jolibrain/wheatley#93",
    expected=Expected(step=2, phase="loss", op="aten.std", event="nan"),
    accepted=("SG205",),
)
def advantage_normalised_in_batch_of_one(fixed: bool) -> Scene:
    """The last minibatch has one sample: the standard deviation of its advantage is 0 / 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        return regression(step, count=1 if step == 2 else 4)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        advantage = b["y"]
        if len(advantage) > 1 or not fixed:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return -(advantage * model(b["x"])).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


class TemporalVariance(nn.Module):
    """Mean and variance over time, as speaker models pool."""

    def __init__(self, *, correction: int) -> None:
        super().__init__()
        self.correction = correction

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean(1), torch.var(x, dim=1, correction=self.correction)], -1)


@incident(
    "speechbrain/speechbrain#181",
    expected=Expected(step=1, phase="forward", module="pool", op="aten.var", event="nan"),
    accepted=("SG205",),
)
def statistics_pooling_of_one_frame(fixed: bool) -> Scene:
    """A batch of very short clips has one frame each: variance over time divides by n - 1 = 0."""
    torch.manual_seed(0)
    model = chain(
        frame=nn.Linear(3, 4),
        pool=TemporalVariance(correction=0 if fixed else 1),
        head=nn.Linear(8, 2),
    )

    def batch(step: int) -> Batch:
        return {"x": randn(4, 1 if step == 1 else 6, 3, seed=step), "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class MeanPool(nn.Module):
    """Mean over the valid tokens of each sample."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask.to(x.dtype)[..., None]
        return (x * weights).sum(1) / weights.sum(1).clamp_min(self.least)


class SentenceEncoder(nn.Module):
    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.emb, self.pool, self.head = nn.Embedding(8, 4), MeanPool(least=least), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.pool(self.emb(ids), ids.ne(0)))


@incident(
    "MrLeeeee/GCN-GAT-and-Graphsage#3",
    expected=Expected(step=1, phase="forward", module="pool", op="aten.div", event="nan", sample=2),
    accepted=("SG102",),
)
def mean_pooling_of_empty_sentence(fixed: bool) -> Scene:
    """A sentence that tokenises to nothing: its token sum 0 is divided by its token count 0."""
    torch.manual_seed(0)
    model = SentenceEncoder(least=1.0 if fixed else 0.0)

    def batch(step: int) -> Batch:
        ids = tokens(4, 5, seed=step, low=1)
        if step == 1:
            ids[2] = 0
        return {"ids": ids, "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#70348",
    "huggingface/transformers#5651",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan", micro=2, grads_finite=True),
    accepted=("SG102",),
)
def token_mean_of_empty_micro_batch(fixed: bool) -> Scene:
    """Gradient accumulation: the third micro-batch was truncated to its prompt, so no label is left
    to divide by.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))

    def batch(step: int) -> list[Batch]:
        micros = []
        for k in range(3):
            ids = tokens(2, 4, seed=10 * step + k)
            blank = step == 1 and k == 2
            micros.append(
                {"ids": ids, "y": torch.full_like(ids, -100) if blank else ids.roll(-1, 1)}
            )
        return micros

    def loss(model: nn.Module, b: Batch) -> Tensor:
        y = b["y"].flatten()
        total = F.cross_entropy(
            model(b["ids"]).flatten(0, 1), y, reduction="sum", ignore_index=-100
        )
        count = y.ne(-100).sum()
        return total / (count.clamp_min(1) if fixed else count)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#75181",
    expected=Expected(
        step=1, phase="loss", module="criterion", op="aten.nll_loss_forward", event="nan"
    ),
    accepted=("SG102",),
)
def all_classes_of_the_batch_weigh_nothing(fixed: bool) -> Scene:
    """Class weights silence the background; a batch with nothing else has total weight 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1e-3 if fixed else 0.0, 1.0, 1.0]))

    def batch(step: int) -> Batch:
        y = torch.zeros(4, dtype=torch.long) if step == 1 else torch.tensor([0, 1, 2, 1])
        return {"x": randn(4, 3, seed=step), "y": y}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["y"])

    return Scene(model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "unit8co/darts#1739",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan", grads_finite=True),
    accepted=("SG102",),
)
def mean_over_missing_sensor(fixed: bool) -> Scene:
    """Missing targets are NaN and masked per channel; one sensor was off for the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        y = randn(4, 2, seed=step + 1)
        y[0, 0] = NAN
        if step == 1:
            y[:, 1] = NAN
        return {"x": randn(4, 3, seed=step), "y": y}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        known = b["y"].isfinite()
        error = torch.where(known, model(b["x"]) - b["y"].nan_to_num(0.0), 0.0).pow(2).sum(0)
        count = known.sum(0)
        return (error / (count.clamp_min(1) if fixed else count)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "open-mmlab/mmdetection#3013",
    expected=Expected(
        step=1, phase="loss", op="aten.smooth_l1_loss", event="nan", grads_finite=True
    ),
    accepted=("SG102",),
)
def box_loss_of_image_without_objects(fixed: bool) -> Scene:
    """smooth_l1_loss over the positive anchors of a batch that has none."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def batch(step: int) -> Batch:
        positive = (
            torch.tensor([True, False, True]) if step != 1 else torch.zeros(3, dtype=torch.bool)
        )
        return {"x": randn(3, 3, seed=step), "y": randn(3, 4, seed=step + 1), "positive": positive}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        boxes, wanted = model(b["x"])[b["positive"]], b["y"][b["positive"]]
        if fixed:
            return F.smooth_l1_loss(boxes, wanted, reduction="sum") / max(len(boxes), 1)
        return F.smooth_l1_loss(boxes, wanted)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

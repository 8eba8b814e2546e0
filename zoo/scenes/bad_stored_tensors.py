"""Bad stored tensors: buffers written in forward, statistics, loaded weights and moments."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, chain, randn, regression, sgd, uninitialised

LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def labelled(step: int) -> Batch:
    return {"x": randn(4, 3, seed=step), "y": LABELS}


class Codebook(nn.Module):
    """A vector quantiser whose codes are running means, written during the forward pass."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.register_buffer("codes", torch.tensor([[1.0, 1.0], [-1.0, -1.0], [9.0, 9.0]]))
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x[:, None] - self.codes).pow(2).sum(-1).argmin(-1)
        quantised = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 3).to(x.dtype)
            total, count = chosen.T @ x, chosen.sum(0)[:, None]
            self.codes.copy_(
                0.9 * self.codes
                + 0.1 * total / (count.clamp_min(self.least) if self.least else count)
            )
        return x + (quantised - x).detach()


@incident(
    "nadavbh12/VQ-VAE#11",
    "v-iashin/SpecVQGAN#20",
    expected=Expected(
        step=0,
        phase="forward",
        module="quantise",
        op="aten.div",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"poisoned": ["quantise.codes"]},
    ),
    accepted=("SG102", "SG201", "SG602"),
)
def codebook_entry_without_members(fixed: bool) -> Scene:
    """Running-mean codes are divided by their member count, 0 for a dead code. This step is fine,
    the next is not.
    """
    torch.manual_seed(0)
    model = chain(
        inp=nn.Linear(3, 2), quantise=Codebook(least=1.0 if fixed else 0.0), out=nn.Linear(2, 2)
    )
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=3)


class RunningScale(nn.Module):
    """Divides by a bias-corrected running average, as Adam does, but from step 0."""

    def __init__(self, *, first: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3))
        self.steps = first

    def forward(self, x: Tensor) -> Tensor:
        corrected = self.average / (1 - 0.9**self.steps)
        with torch.no_grad():
            self.average.lerp_(x.abs().mean(0), 0.1)
        self.steps += 1
        return x / (corrected + 1.0)


@incident(
    "facebookresearch/schedule_free#5",
    expected=Expected(step=0, phase="forward", module="scale", op="aten.div", event="nan"),
    accepted=("SG201",),
)
def bias_correction_at_step_zero(fixed: bool) -> Scene:
    """1 - decay ** 0 is 0: the corrected average of the first step is 0 / 0."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.head = RunningScale(first=1 if fixed else 0), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale(x))

    model = Net()
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=1)


class FrozenNorm(nn.Module):
    """BatchNorm that stays in evaluation mode, as detection backbones keep it."""

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.bn.running_var[1] = variance

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.conv(x)))


@incident(
    "facebookresearch/SparseConvNet#190",
    expected=Expected(
        step=0, phase="forward", module="bn", op="aten.native_batch_norm", event="nan"
    ),
    accepted=("SG207", "SG602"),
)
def frozen_statistics_with_negative_variance(fixed: bool) -> Scene:
    """An averaged checkpoint has a running variance of -0.5; frozen BatchNorm takes its root in
    training.
    """
    torch.manual_seed(0)
    model = FrozenNorm(0.5 if fixed else -0.5)
    model.train()
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=1)


@incident(
    "gordicaleksa/pytorch-GAT#11",
    expected=Expected(step=0, phase="state", module="", op="aten.add", event="buffer:position"),
    accepted=("SG602", "SG601"),
)
def position_table_never_filled(fixed: bool) -> Scene:
    """register_buffer("position", torch.empty(...)); the loop that should fill it is not called."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("position", torch.zeros(3) if fixed else uninitialised(3))
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.position)

    model = Net()
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=1)


@incident(
    "jiesutd/NCRFpp#126",
    expected=Expected(
        step=0, phase="state", module="emb", op="aten.embedding", event="param:emb.weight"
    ),
    accepted=("SG601",),
)
def pretrained_embedding_with_nan_rows(fixed: bool) -> Scene:
    """Rows of unknown words come from numpy.empty and hold NaN; the first batch contains one of
    them.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(6, 4), flat=nn.Flatten(), head=nn.Linear(8, 2))
    if not fixed:
        with torch.no_grad():
            model.emb.weight[3, :2] = NAN

    def batch(step: int) -> Batch:
        return {"x": torch.tensor([[1, 2], [4, 3], [5, 1], [2, 2]]), "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=1)


@incident(
    "huggingface/transformers#4586",
    expected=Expected(step=0, phase="state", module="fc", op="aten.addmm", event="param:fc.weight"),
    accepted=("SG601",),
)
def weights_cast_to_half_and_back(fixed: bool) -> Scene:
    """A checkpoint was saved in fp16: a weight of 7e4 became infinite on the way."""
    torch.manual_seed(0)
    model = chain(fc=nn.Linear(3, 4), act=nn.ReLU(), out=nn.Linear(4, 2))
    with torch.no_grad():
        model.fc.weight[0, 0] = 7e4 if not fixed else 1.0
        model.fc.weight.copy_(model.fc.weight.half().float())
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=1)


class BestSoFar(nn.Module):
    """Normalises by the largest value ever seen; the buffer begins at -inf and is divided by before
    it is updated.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("peak", torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.peak


@incident(
    "ecmwf/WeatherGenerator#2724",
    expected=Expected(
        step=0, phase="state", module="peak", op="aten.mul", event="buffer:peak.peak"
    ),
    accepted=("SG602",),
)
def running_peak_used_before_first_update(fixed: bool) -> Scene:
    """A buffer that starts at NaN until calibrated is used in the first step."""
    torch.manual_seed(0)
    model = chain(inp=nn.Linear(3, 4), peak=BestSoFar(1.0 if fixed else NAN), out=nn.Linear(4, 2))
    return Scene(model=model, batch=labelled, loss=classify, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#1206",
    "pytorch/pytorch#10008",
    expected=Expected(
        step=1,
        phase="forward",
        event="buffer:bn.running_var",
        loss_finite=True,
        grads_finite=True,
        proof={"left_behind": True},
    ),
    accepted=("SG103", "SG602"),
)
def batch_norm_variance_overflows(fixed: bool) -> Scene:
    """A fill value of 1e20: the batch variance is infinite, the output 0 and finite, the running
    variance ruined.
    """
    torch.manual_seed(0)
    model = chain(bn=nn.BatchNorm1d(3), head=nn.Linear(3, 2))

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1 and not fixed:
            x[2, 0] = 1e20
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model), steps=3)


@incident(
    "unit8co/darts#2100",
    expected=Expected(
        step=2, phase="input", module="norm", op="aten.native_layer_norm", event="batch:x", sample=1
    ),
    accepted=("SG101",),
)
def infinite_ratio_feature(fixed: bool) -> Scene:
    """A price-earnings ratio with earnings 0 is inf; LayerNorm turns the whole row into NaN."""
    torch.manual_seed(0)
    model = chain(norm=nn.LayerNorm(3), fc=nn.Linear(3, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 2 and not fixed:
            data["x"][1, 2] = INF
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=3)

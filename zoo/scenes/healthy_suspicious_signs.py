"""Healthy runs that look suspicious: every alarm here is a false one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.case import Batch, Scene, control
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, chain, randn, regression, sgd

LABELS = torch.tensor([0, 1, 0, 1])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out.sum(1))


@control()
def ok_nan_padding_is_packed_away(fixed: bool) -> Scene:
    """Padding is NaN on purpose, and packing never reads it."""
    torch.manual_seed(0)
    model = Packed()

    def batch(step: int) -> Batch:
        x, length = randn(4, 5, 3, seed=step), torch.tensor([5, 3, 2, 4])
        x[torch.arange(5)[None] >= length[:, None]] = NAN
        return {"x": x, "length": length, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["length"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=6)


@control()
def ok_empty_bag_is_zero(fixed: bool) -> Scene:
    """EmbeddingBag gives 0 for a bag without words."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(8, 4, mode="mean"), "head": nn.Linear(4, 2)})

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model["head"](model["bag"](b["ids"], b["offsets"])), b["y"])

    def batch(step: int) -> Batch:
        return {
            "ids": torch.tensor([1, 2, 3, 4, 5]),
            "offsets": torch.tensor([0, 2, 2, 4]),
            "y": LABELS,
        }

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=6)


@control("wenet-e2e/wenet#2299")
def ok_impossible_alignment_is_zeroed(fixed: bool) -> Scene:
    """ctc_loss with zero_infinity drops a target that is longer than its input."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5)

    def batch(step: int) -> Batch:
        return {
            "x": randn(4, 4, 3, seed=step),
            "y": torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1], [2, 3, 1, 4], [4, 2, 1, 3]]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_probs = model(b["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(
            log_probs, b["y"], torch.full((4,), 4), torch.full((4,), 4), zero_infinity=True
        )

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=6)


@control("pytorch/pytorch#4320", "google-research/vmoe#218")
def ok_standard_deviation_of_constant_features(fixed: bool) -> Scene:
    """torch.std of equal values: this torch gives the subgradient 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        z = model(b["x"])
        return F.relu(1 - z.std(0)).mean() + z.pow(2).mean()

    return Scene(
        model=model,
        batch=lambda step: {"x": torch.ones(4, 3)},
        loss=loss,
        optimizer=sgd(model),
        steps=6,
    )


@control("tensorflow/tensorflow#3862")
def ok_products_with_zeros(fixed: bool) -> Scene:
    """prod and cumprod through an exact 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        x[1] = 0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        z = model(b["x"]).relu()
        return z.prod(-1).mean() + z.cumprod(-1).mean() + z.pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=6)


@control()
def ok_perfect_fit_meets_noise(fixed: bool) -> Scene:
    """The loss is at 1e-13 and jumps a millionfold with a batch that is not quite exact."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        x = randn(16, 3, seed=step)
        y = x.sum(1, keepdim=True)
        return {
            "x": x,
            "y": y + (1e-3 * randn(16, 1, seed=step + 1) if step > 150 and step % 10 == 0 else 0),
        }

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 0.3), steps=200)


@control()
def ok_reward_is_maximised(fixed: bool) -> Scene:
    """maximize=True: the number that is returned rises all the time, as it should."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, maximize=True)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (
            1000
            * torch.exp(-(model(b["x"]) - b["x"].sum(1, keepdim=True) - 3).pow(2) / 10).mean()
            / 300
        )

    return Scene(
        model=model,
        batch=lambda step: regression(step, count=16),
        loss=loss,
        optimizer=optimizer,
        steps=80,
    )


@control()
def ok_penalty_grows_from_zero(fixed: bool) -> Scene:
    """The distance to a reference policy is exactly 0 at first and is the whole loss then."""
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p, log_q = model(b["x"]).log_softmax(-1), reference(b["x"]).log_softmax(-1)
        gain = (log_p - log_p.detach()).gather(1, b["y"][:, None])
        return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") - gain.mean()

    def batch(step: int) -> Batch:
        x = randn(16, 3, seed=step)
        return {"x": x, "y": (x[:, 0] > 0).long()}

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.2), steps=80)


@control()
def ok_second_loss_is_switched_on(fixed: bool) -> Scene:
    """As in VQGAN, a second term enters after 40 steps and is fifty times larger than the first."""
    torch.manual_seed(0)
    model = chain(inp=nn.Linear(3, 8), act=nn.Tanh(), head=nn.Linear(8, 2))
    now = {"step": 0}

    def before(step: int) -> None:
        now["step"] = step

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        first = F.mse_loss(out[:, :1], b["x"].sum(1, keepdim=True).tanh())
        return first + (F.l1_loss(out[:, 1:], torch.full((16, 1), 5.0)) if now["step"] >= 40 else 0)

    return Scene(
        model=model,
        batch=lambda step: {"x": randn(16, 3, seed=step)},
        loss=loss,
        optimizer=sgd(model, 0.05),
        steps=80,
        before_step=before,
    )


class WithLogProbability(nn.Module):
    """Returns a second output that is not read."""

    lowest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 2)
        self.register_buffer("lowest", torch.full((2,), INF))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inp(x)
        self.lowest = torch.minimum(self.lowest, out.detach().amin(0))
        return out, torch.log(out.relu())


@control()
def ok_second_output_is_infinite_and_unread(fixed: bool) -> Scene:
    """The log of a dead unit is -inf and goes nowhere; a running minimum starts at +inf."""
    torch.manual_seed(0)
    model = WithLogProbability()

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"])[0], b["y"])

    return Scene(
        model=model,
        batch=lambda step: {"x": randn(4, 3, seed=step), "y": LABELS},
        loss=loss,
        optimizer=sgd(model),
        steps=6,
    )


@control()
def ok_backbone_is_unfrozen(fixed: bool) -> Scene:
    """After 30 steps the trunk begins to learn: the gradient norm jumps, the loss falls."""
    torch.manual_seed(0)
    model = chain(body=nn.Linear(3, 8), act=nn.Tanh(), head=nn.Linear(8, 1))
    model.body.requires_grad_(False)

    def before(step: int) -> None:
        if step == 30:
            model.body.requires_grad_(True)
            with torch.no_grad():
                model.head.weight.mul_(1.0)

    return Scene(
        model=model,
        batch=lambda step: regression(step, count=16),
        loss=mse,
        optimizer=sgd(model, 0.05),
        steps=60,
        before_step=before,
    )


@control()
def ok_group_norm_of_one_value(fixed: bool) -> Scene:
    """Groups of one value have variance 0; the epsilon takes care of it."""
    torch.manual_seed(0)
    model = chain(inp=nn.Linear(3, 4), norm=nn.GroupNorm(4, 4), head=nn.Linear(4, 1))
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model), steps=6)

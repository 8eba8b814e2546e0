"""Overflows on finite numbers: exponentials, powers, fill values, weights that are garbage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.log_and_root_domains import eye_linear
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd, tokens


class Encoder(nn.Module):
    """Mean and log variance of a variational autoencoder."""

    def __init__(self, *, bounded: bool) -> None:
        super().__init__()
        self.mean, self.log_var, self.decode = nn.Linear(2, 2), eye_linear(), nn.Linear(2, 2)
        self.bounded = bounded

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.mean(x), self.log_var(x)
        if self.bounded:
            log_var = log_var.clamp(-30, 20)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return self.decode(z), mean, log_var


@incident(
    "vanderschaarlab/synthcity#331",
    "AntixK/PyTorch-VAE#16",
    expected=Expected(step=1, phase="loss", op="aten.exp", event="inf", sample=1),
    accepted=("SG203",),
)
def vae_log_variance_overflows(fixed: bool) -> Scene:
    """exp(log_var) in the KL term; an unusual sample has a log variance of 95."""
    torch.manual_seed(0)
    model = Encoder(bounded=fixed)

    def batch(step: int) -> Batch:
        x = randn(4, 2, seed=step)
        if step == 1:
            x[1, 0] = 95.0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out, mean, log_var = model(b["x"])
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(-1).mean()
        return F.l1_loss(out, b["x"]) + kl

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))


@incident(
    "LEEYOONHYUNG/BVAE-TTS#8",
    expected=Expected(
        step=1, phase="forward", module="positive", op="aten.exp", event="inf", sample=0
    ),
    accepted=("SG203",),
)
def softplus_by_hand(fixed: bool) -> Scene:
    """log(1 + exp(x)) instead of softplus(x) at x = 120."""
    torch.manual_seed(0)

    def positive(x: Tensor) -> Tensor:
        return F.softplus(x) if fixed else torch.log(1 + torch.exp(x))

    model = chain(inp=eye_linear(), positive=Lambda(positive), out=nn.Linear(2, 1))

    def batch(step: int) -> Batch:
        data = regression(step, features=2)
        if step == 1:
            data["x"][0, 1] = 120.0
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.smooth_l1_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


class Uncertainty(nn.Module):
    """Learned task weights exp(-s) * loss + s."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.full((2,), start))

    def forward(self, losses: Tensor) -> Tensor:
        return (torch.exp(-self.log_var) * losses + self.log_var).sum()


@incident(
    "rickgroen/cov-weighting#3",
    expected=Expected(step=0, phase="loss", module="criterion", op="aten.exp", event="inf"),
    accepted=("SG203",),
)
def learned_task_weight_overflows(fixed: bool) -> Scene:
    """A checkpoint of the task weights holds s = -90: exp(90) is infinite. The weights live in the
    criterion.
    """
    torch.manual_seed(0)
    model, criterion = nn.Linear(3, 2), Uncertainty(-1.0 if fixed else -90.0)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=1e-3)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion((model(b["x"]) - b["y"]).pow(2).mean(0))

    return Scene(
        model=model,
        criterion=criterion,
        batch=lambda step: regression(step, outputs=2),
        loss=loss,
        optimizer=optimizer,
        steps=1,
    )


@incident(
    "unit8co/darts#1977",
    expected=Expected(step=1, phase="loss", op="aten.mse_loss", event="inf", sample=2),
    accepted=("SG103",),
)
def netcdf_fill_value_as_feature(fixed: bool) -> Scene:
    """9.97e36, the fill value of a file format, reached the network as a feature."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(3, 4), act=nn.ReLU(), fc2=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1 and not fixed:
            data["x"][2, 0] = 9.97e36
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model))


@incident(
    "cvignac/SMP#3",
    expected=Expected(
        step=1, phase="forward", module="features", op="aten.pow", event="inf", sample=3
    ),
    accepted=("SG103", "SG203"),
)
def polynomial_features_of_a_timestamp(fixed: bool) -> Scene:
    """A raw time stamp of 1.7e9 among normalised features, to the fifth power."""
    torch.manual_seed(0)

    def polynomial(x: Tensor) -> Tensor:
        x = x.clamp(-10, 10) if fixed else x
        return torch.cat([x, x**5], -1)

    model = chain(features=Lambda(polynomial), head=nn.Linear(6, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1:
            data["x"][3, 2] = 1.7e9
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-12))


class Garbage(nn.Module):
    """An attention bias made by torch.empty, which happened to hold large numbers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.lin, self.context = nn.Linear(3, 4), nn.Parameter(torch.full((4, 1), value))

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) @ self.context).pow(2)


@incident(
    "EdGENetworks/attention-networks-for-classification#7",
    "jiesutd/NCRFpp#126",
    expected=Expected(step=0, phase="forward", module="", op="aten.pow", event="inf"),
    accepted=("SG601", "SG103", "SG505"),
)
def garbage_in_an_uninitialised_parameter(fixed: bool) -> Scene:
    """torch.empty gave 2.4e30: finite, so nothing complains until something is squared."""
    torch.manual_seed(0)
    model = Garbage(0.1 if fixed else 2.4e30)
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model), steps=1)


@incident(
    "orybkin/sigma-vae-pytorch#10",
    expected=Expected(step=1, phase="loss", op="aten.exp", event="inf", sample=0, loss_finite=True),
    accepted=("SG403", "SG203"),
)
def capped_exponential(fixed: bool) -> Scene:
    """min(exp(x), 100): the cap hides the infinity in forward, backward multiplies it by 0."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = randn(3, 2, seed=step)
        if step == 1:
            x[0, 0] = 200.0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        return torch.clamp(torch.exp(out.clamp(max=4.6) if fixed else out), max=100.0).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-5))


class Recurrent(nn.Module):
    """A linear recurrence over 64 tokens, the state read out through a bounded function."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.emb, self.gain, self.head = (
            nn.Embedding(8, 4),
            nn.Parameter(torch.full((4,), gain)),
            nn.Linear(4, 8),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.emb(ids), torch.zeros(ids.shape[0], 4)
        for step in range(ids.shape[1]):
            state = self.gain * state + x[:, step]
        return self.head(state)


@incident(
    "cvignac/SMP#3",
    expected=Expected(step=0, phase="forward", module="", op="aten.mul", event="inf"),
    accepted=("SG505", "SG103", "SG203"),
)
def unstable_recurrence(fixed: bool) -> Scene:
    """A state matrix with eigenvalue 8 over 64 tokens: 8 ** 64 does not fit float32."""
    torch.manual_seed(0)
    model = Recurrent(0.9 if fixed else 8.0)

    def batch(step: int) -> Batch:
        return {"ids": tokens(3, 64, seed=step), "y": torch.tensor([1, 2, 3])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)

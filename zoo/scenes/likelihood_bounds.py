"""Likelihoods and noise: probabilities of exactly 0 or 1, exponents that leave float32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd

LABELS = torch.tensor([0, 1, 0, 1])


def identity(size: int) -> nn.Linear:
    layer = nn.Linear(size, size, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size))
    return layer


@incident(
    "HorizonRobotics/alf#888",
    expected=Expected(step=1, phase="loss", op="aten.lgamma", event="inf", sample=2),
    accepted=("SG202",),
)
def beta_policy_without_concentration(fixed: bool) -> Scene:
    """softplus underflows to a concentration of 0, where lgamma has its pole."""
    model = identity(2)

    def batch(step: int) -> Batch:
        x = randn(4, 2, seed=step)
        if step == 1:
            x[2, 0] = -300.0
        return {"x": x, "action": torch.tensor([0.2, 0.5, 0.7, 0.9])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        a, c = (F.softplus(model(b["x"])) + (1e-3 if fixed else 0.0)).unbind(-1)
        return -Beta(a, c, validate_args=False).log_prob(b["action"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))


@incident(
    "HorizonRobotics/alf#957",
    expected=Expected(step=1, phase="loss", op="aten.xlogy", event="inf", sample=1),
    accepted=("SG202", "SG104"),
)
def dirichlet_density_on_the_edge(fixed: bool) -> Scene:
    """A topic share of exactly 0 has no density under a concentration other than 1."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def batch(step: int) -> Batch:
        share = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2], [0.3, 0.3, 0.4]])
        if step == 1:
            share[1] = torch.tensor([0.0, 0.2, 0.8])
        return {"x": randn(4, 3, seed=step), "share": share}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        share = b["share"].clamp_min(1e-6) if fixed else b["share"]
        return (
            -Dirichlet(F.softplus(model(b["x"])) + 0.1, validate_args=False).log_prob(share).mean()
        )

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


class Gumbel(nn.Module):
    """Gumbel noise by hand."""

    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, logits: Tensor, u: Tensor) -> Tensor:
        noise = -torch.log(-torch.log(u.clamp(self.least, 1 - self.least)))
        return (logits + noise).softmax(-1)


class Sampler(nn.Module):
    def __init__(self, *, least: float) -> None:
        super().__init__()
        self.inp, self.gumbel = nn.Linear(3, 2), Gumbel(least=least)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return self.gumbel(self.inp(x), u)


@incident(
    "pytorch/pytorch#22442",
    "clab/dynet#561",
    expected=Expected(
        step=1, phase="forward", module="gumbel", op="aten.log", event="inf", sample=2
    ),
    accepted=("SG202",),
)
def gumbel_noise_of_certainty(fixed: bool) -> Scene:
    """A uniform draw rounded to 1: -log(-log(1)) is infinite and the softmax NaN."""
    torch.manual_seed(0)
    model = Sampler(least=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        u = torch.rand(4, 2, generator=torch.Generator().manual_seed(step)) * 0.8 + 0.1
        if step == 1:
            u[2, 0] = 1.0
        return {"x": randn(4, 3, seed=step), "u": u, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"], b["u"])[:, 0], b["y"].float())

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pymc-devs/pymc#2832",
    expected=Expected(step=1, phase="loss", op="aten.i0", event="inf", sample=3),
    accepted=("SG203", "SG103"),
)
def von_mises_normaliser_overflows(fixed: bool) -> Scene:
    """log I0(kappa) by hand: the Bessel function overflows above 91."""
    torch.manual_seed(0)
    model = chain(inp=identity(1), act=nn.Softplus())

    def batch(step: int) -> Batch:
        x = randn(4, 1, seed=step)
        if step == 1:
            x[3] = 400.0
        return {"x": x, "angle": torch.tensor([[0.1], [0.4], [-0.3], [0.2]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        kappa = model(b["x"])
        log_i0 = (
            torch.log(torch.special.i0e(kappa)) + kappa if fixed else torch.log(torch.i0(kappa))
        )
        return (log_i0 - kappa * torch.cos(b["angle"])).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))


@incident(
    "THUDM/slime#2198",
    "huggingface/trl#454",
    expected=Expected(step=1, phase="loss", op="aten.exp", event="inf", sample=1, loss_finite=True),
    accepted=("SG403", "SG402", "SG203"),
)
def clipped_ratio_overflows(fixed: bool) -> Scene:
    """PPO takes the clipped objective, so the loss is fine; the ratio that it passed over is
    infinite.
    """
    model = identity(1)

    def batch(step: int) -> Batch:
        old = torch.tensor([0.1, 0.2, 0.3, 0.1])
        if step == 1:
            old[1] = -120.0
        return {
            "x": torch.tensor([[0.1], [0.2], [0.3], [0.2]]),
            "old": old,
            "advantage": torch.ones(4),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        gap = model(b["x"]).squeeze(-1) - b["old"]
        ratio = torch.exp(gap.clamp(max=20.0) if fixed else gap)
        return -torch.min(ratio * b["advantage"], ratio.clamp(0.8, 1.2) * b["advantage"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    expected=Expected(step=0, phase="loss", op="aten.div", event="nan"),
    accepted=("SG201",),
)
def discounted_return_by_division(fixed: bool) -> Scene:
    """cumsum(r * g^t) / g^t over a long episode: g^t has underflowed to 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    length = 1200

    def batch(step: int) -> Batch:
        return {"x": randn(1, length, 3, seed=step), "reward": randn(1, length, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        reward = b["reward"][0]
        discount = 0.9 ** torch.arange(200 if fixed else length)
        reward = reward[: len(discount)]
        future = (reward * discount).flip(0).cumsum(0).flip(0) / discount
        return F.mse_loss(model(b["x"][0, : len(discount)]).squeeze(-1), future)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)


@incident(
    "bghira/SimpleTuner#187",
    expected=Expected(step=1, phase="loss", op="aten.log", event="nan", sample=0),
    accepted=("SG202",),
)
def log_snr_at_the_end_of_a_cosine_schedule(fixed: bool) -> Scene:
    """cos(pi / 2) is slightly negative in float32, so log(alpha) is NaN at t = 1."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        return {**regression(step), "t": torch.tensor([1.0 if step == 1 else 0.5, 0.2, 0.4, 0.7])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        t = b["t"].clamp(max=0.999) if fixed else b["t"]
        snr = 2 * (torch.log(torch.cos(t * math.pi / 2)) - torch.log(torch.sin(t * math.pi / 2)))
        return ((model(b["x"]) - b["y"]).pow(2).squeeze(-1) * torch.sigmoid(snr)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "TiankaiHang/Min-SNR-Diffusion-Training#2",
    expected=Expected(step=1, phase="loss", op="aten.div", event="inf", sample=3),
    accepted=("SG201",),
)
def denoising_weight_of_no_noise(fixed: bool) -> Scene:
    """The weight (s^2 + d^2) / (s d)^2 at a noise level of 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        return {
            **regression(step),
            "sigma": torch.tensor([1.0, 0.5, 2.0, 0.0 if step == 1 else 0.3]),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        sigma = b["sigma"].clamp_min(1e-2) if fixed else b["sigma"]
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        return (weight * (model(b["x"]) - b["y"]).pow(2).squeeze(-1)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-5))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.cosh", event="inf", sample=2),
    accepted=("SG203", "SG103"),
)
def log_cosh_of_a_large_error(fixed: bool) -> Scene:
    """log(cosh(e)) by hand for a target that is off by 200."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        b = regression(step)
        if step == 1:
            b["y"][2] = 200.0
        return b

    def loss(model: nn.Module, b: Batch) -> Tensor:
        e = model(b["x"]) - b["y"]
        return (
            (e + F.softplus(-2 * e) - math.log(2)).mean()
            if fixed
            else torch.log(torch.cosh(e)).mean()
        )

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    expected=Expected(
        step=1, phase="forward", module="hertz", op="aten.pow", event="inf", sample=0
    ),
    accepted=("SG203", "SG103"),
)
def pitch_in_octaves_overflows(fixed: bool) -> Scene:
    """440 * 2^pitch with a pitch that should have been in cents."""
    limit = 20.0 if fixed else 1e9
    model = chain(
        inp=identity(1), hertz=Lambda(lambda p: 440.0 * torch.pow(2.0, p.clamp(max=limit)))
    )

    def batch(step: int) -> Batch:
        x = randn(4, 1, seed=step)
        if step == 1:
            x[0] = 1200.0
        return {"x": x, "y": torch.full((4, 1), 440.0)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.l1_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-9))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.logit", event="inf", sample=1),
    accepted=("SG104", "SG202"),
)
def logit_of_a_hard_label(fixed: bool) -> Scene:
    """Regression on logit(p), and one of the soft labels is exactly 1."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        p = torch.tensor([[0.2], [0.7], [0.4], [0.9]])
        if step == 1:
            p[1] = 1.0
        return {"x": randn(4, 3, seed=step), "p": p}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), torch.logit(b["p"], eps=1e-4 if fixed else None))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.log1p", event="inf", sample=3),
    accepted=("SG202", "SG104"),
)
def log_return_of_a_bankruptcy(fixed: bool) -> Scene:
    """log1p of a return of -100 percent."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        gain = torch.tensor([[0.1], [-0.2], [0.05], [-1.0 if step == 1 else 0.3]])
        return {"x": randn(4, 3, seed=step), "gain": gain}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        gain = b["gain"].clamp_min(-0.99) if fixed else b["gain"]
        return F.mse_loss(model(b["x"]), torch.log1p(gain))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "cellarium-ai/cellarium-ml#215",
    expected=Expected(step=1, phase="loss", op="aten.exp", event="inf", sample=2),
    accepted=("SG203",),
)
def poisson_log_rate_overflows(fixed: bool) -> Scene:
    """poisson_nll_loss exponentiates the log rate; a count of millions went in as a feature."""
    model = identity(1)

    def batch(step: int) -> Batch:
        x = randn(4, 1, seed=step)
        if step == 1:
            x[2] = 150.0
        return {"x": x, "count": torch.tensor([[1.0], [0.0], [3.0], [2.0]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        rate = model(b["x"])
        return F.poisson_nll_loss(rate.clamp(max=10.0) if fixed else rate, b["count"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-7))


@incident(
    "MakazhanAlpamys/Soup#719",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=0),
    accepted=("SG202", "SG206"),
)
def divergence_from_a_zero_probability(fixed: bool) -> Scene:
    """kl_div of log(p) with p underflowed to 0: where the target is 0 too, 0 * -inf is NaN."""
    model = identity(3)

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[0] = torch.tensor([150.0, 0.0, 0.0])
        return {"x": x, "p": torch.tensor([[1.0, 0.0, 0.0]] * 4)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        z = model(b["x"])
        log_q = z.log_softmax(-1) if fixed else torch.log(z.softmax(-1))
        return F.kl_div(log_q, b["p"], reduction="batchmean")

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))

"""Arguments outside a domain: logarithms, roots, inverse functions, targets of a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd


def eye_linear(*, bias: float = 0.0, size: int = 2) -> nn.Linear:
    """A layer that passes its input on, so that a case can choose its activations."""
    layer = nn.Linear(size, size)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size))
        layer.bias.fill_(bias)
    return layer


@incident(
    "cpnota/autonomous-learning-library#139",
    "philtabor/Actor-Critic-Methods-Paper-To-Code#7",
    expected=Expected(
        step=1, phase="loss", op="aten.log", event="nan", sample=0, grads_finite=True
    ),
    accepted=("SG202",),
)
def squashed_action_beyond_its_scale(fixed: bool) -> Scene:
    """log(1 - action ** 2 + eps) with actions scaled to [-2, 2]: the argument turns negative."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = randn(4, 2, seed=step) * 0.1
        if step == 1:
            x[0, 1] = 3.0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        squashed = torch.tanh(model(b["x"]))
        inside = squashed if fixed else 2.0 * squashed
        return torch.log(1 - inside.pow(2) + 1e-6).sum(-1).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "rail-berkeley/hil-serl#6",
    "denisyarats/pytorch_sac#7",
    expected=Expected(step=1, phase="loss", op="aten.atanh", event="inf", sample=2),
    accepted=("SG202", "SG104", "SG207"),
)
def expert_action_on_the_bound(fixed: bool) -> Scene:
    """Behaviour cloning unsquashes expert actions with atanh; one expert pushed the stick to
    exactly 1.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        action = randn(4, 2, seed=step + 3).tanh() * 0.9
        if step == 1:
            action[2, 0] = 1.0
        return {"x": randn(4, 3, seed=step), "action": action}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        action = b["action"].clamp(-0.999, 0.999) if fixed else b["action"]
        return F.mse_loss(model(b["x"]), torch.atanh(action))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "banctilrobitaille/torch-vectorized#7",
    "pytorch/pytorch#4605",
    expected=Expected(step=1, phase="loss", op="aten.acos", event="nan", sample=1),
    accepted=("SG207",),
)
def rotation_angle_beyond_one(fixed: bool) -> Scene:
    """acos((trace - 1) / 2) of a predicted rotation that is slightly too long for a rotation."""
    torch.manual_seed(0)
    model = eye_linear(size=3)

    def batch(step: int) -> Batch:
        diagonal = torch.tensor([[0.9, 0.8, 0.7], [0.5, 0.9, 0.6], [0.3, 0.2, 0.4]])
        if step == 1:
            diagonal[1] = 1.0001
        return {"x": diagonal}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        cosine = (model(b["x"]).sum(-1) - 1) / 2
        return torch.acos(cosine.clamp(-0.999, 0.999) if fixed else cosine).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-5))


class RunningSpread(nn.Module):
    """sqrt(E[x^2] - E[x]^2), which rounding makes negative."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).pow(2)
        return x / (torch.sqrt(variance.clamp_min(0) if self.safe else variance) + 1e-5)


@incident(
    expected=Expected(
        step=1, phase="forward", module="spread", op="aten.sqrt", event="nan", sample=2
    ),
    accepted=("SG207",),
)
def variance_rounded_below_zero(fixed: bool) -> Scene:
    """A sensor stuck at 1000.1: the difference of two large means is a small negative number."""
    torch.manual_seed(0)
    model = chain(spread=RunningSpread(safe=fixed), head=nn.Linear(7, 2))

    def batch(step: int) -> Batch:
        x = randn(4, 7, seed=step)
        if step == 1:
            x[2] = 1000.1
        return {"x": x, "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    "kornia/kornia#918",
    expected=Expected(step=0, phase="forward", module="gamma", op="aten.pow", event="nan"),
    accepted=("SG207",),
)
def gamma_correction_of_negative_output(fixed: bool) -> Scene:
    """x ** (1 / 2.2) of a decoder output that is not confined to positive numbers."""
    torch.manual_seed(0)

    def gamma(x: Tensor) -> Tensor:
        return (x.clamp_min(1e-3) if fixed else x) ** (1 / 2.2)

    model = chain(decode=nn.Conv2d(1, 2, 3), gamma=Lambda(gamma))

    def batch(step: int) -> Batch:
        return {"x": randn(2, 1, 5, 5, seed=step), "y": randn(2, 2, 3, 3, seed=step + 1).abs()}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.l1_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)


@incident(
    "RasmussenLab/vamb#12",
    expected=Expected(
        step=1,
        phase="loss",
        module="criterion",
        op="aten.log",
        event="nan",
        sample=3,
        grads_finite=True,
    ),
    accepted=("SG202",),
)
def poisson_rate_below_zero(fixed: bool) -> Scene:
    """PoissonNLLLoss(log_input=False) on a rate that no activation keeps positive."""
    torch.manual_seed(0)
    model = chain(rate=eye_linear(bias=1.0), act=nn.Softplus() if fixed else nn.Identity())
    criterion = nn.PoissonNLLLoss(log_input=False)

    def batch(step: int) -> Batch:
        x = torch.full((4, 2), 0.5)
        if step == 1:
            x[3, 1] = -4.0
        return {"x": x, "y": torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0], [3.0, 0.0]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["y"])

    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model, 1e-3)
    )


@incident(
    "hwalsuklee/tensorflow-mnist-VAE#4",
    "kvfrans/variational-autoencoder#5",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=1),
    accepted=("SG202",),
)
def binary_cross_entropy_by_hand(fixed: bool) -> Scene:
    """-(y log p + (1 - y) log(1 - p)) where a sigmoid has saturated to exactly 1."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = randn(3, 2, seed=step)
        if step == 1:
            x[1, 0] = 40.0
        return {"x": x, "y": torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        p, y = torch.sigmoid(model(b["x"])), b["y"]
        if fixed:
            return F.binary_cross_entropy_with_logits(model(b["x"]), y)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "summerlvsong/Aggregation-Cross-Entropy#2",
    expected=Expected(
        step=1, phase="loss", op="aten.xlogy", event="nan", sample=0, grads_finite=True
    ),
    accepted=("SG104",),
)
def soft_label_below_zero(fixed: bool) -> Scene:
    """Soft labels from interpolation overshoot: kl_div takes the logarithm of a negative
    probability.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def batch(step: int) -> Batch:
        soft = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
        if step == 1:
            soft[0] = torch.tensor([1.05, -0.1, 0.05])
        return {"x": randn(3, 3, seed=step), "soft": soft}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        soft = b["soft"].clamp_min(0) if fixed else b["soft"]
        return F.kl_div(F.log_softmax(model(b["x"]), -1), soft, reduction="batchmean")

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "ypwhs/captcha_break#29",
    "SeanNaren/warp-ctc#29",
    expected=Expected(
        step=1, phase="loss", module="criterion", op="aten._ctc_loss", event="inf", sample=2
    ),
    accepted=("SG104",),
)
def ctc_target_longer_than_input(fixed: bool) -> Scene:
    """Three equal letters need two blanks between them, so five frames; the input has four."""
    torch.manual_seed(0)
    model = chain(frame=nn.Linear(3, 5))
    criterion = nn.CTCLoss(zero_infinity=fixed)

    def batch(step: int) -> Batch:
        target = torch.tensor([[1, 2, 3], [2, 1, 4], [3, 3, 3] if step == 1 else [3, 1, 3]])
        return {"x": randn(3, 4, 3, seed=step), "target": target}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p = F.log_softmax(model(b["x"]), -1).transpose(0, 1)
        count = len(b["target"])
        return criterion(log_p, b["target"], torch.full((count,), 4), torch.full((count,), 3))

    return Scene(model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#1620",
    expected=Expected(step=1, phase="loss", op="aten.log", event="inf", sample=3),
    accepted=("SG202",),
)
def mixture_density_far_from_every_component(fixed: bool) -> Scene:
    """log(sum(pi * N)) with densities in linear space: an outlier has density 0 under every
    component.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 3)

    def batch(step: int) -> Batch:
        y = randn(4, 1, seed=step + 1)
        if step == 1:
            y[3] = 60.0
        return {"x": randn(4, 2, seed=step), "y": y}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        exponent = -0.5 * (b["y"] - model(b["x"])).pow(2)
        if fixed:
            return -torch.logsumexp(exponent, -1).mean()
        return -torch.log(torch.exp(exponent).mean(-1)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    "yxlu-0102/MP-SENet#33",
    expected=Expected(
        step=1, phase="forward", module="decibel", op="aten.log10", event="inf", sample=1
    ),
    accepted=("SG202",),
)
def decibels_of_silence(fixed: bool) -> Scene:
    """20 log10 |STFT| of digital silence is -inf in every bin."""
    torch.manual_seed(0)

    def decibel(wave: Tensor) -> Tensor:
        magnitude = torch.fft.rfft(wave, dim=-1).abs()
        return 20 * torch.log10(magnitude.clamp_min(1e-5) if fixed else magnitude)

    model = chain(
        decibel=Lambda(decibel), lstm_in=nn.Linear(9, 4), act=nn.Tanh(), head=nn.Linear(4, 1)
    )

    def batch(step: int) -> Batch:
        wave = randn(3, 16, seed=step)
        if step == 1:
            wave[1] = 0
        return {"x": wave, "y": randn(3, 1, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    expected=Expected(step=0, phase="forward", module="upsample", op="aten.log", event="nan"),
    accepted=("SG202",),
)
def bicubic_overshoot_before_log(fixed: bool) -> Scene:
    """Bicubic upsampling of a mask overshoots below 0, and the density is taken in log space."""
    torch.manual_seed(0)

    class Upsample(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            large = F.interpolate(x, scale_factor=2, mode="bicubic")
            return torch.log(large.clamp_min(1e-4) if fixed else large + 1e-4)

    model = chain(upsample=Upsample(), conv=nn.Conv2d(1, 1, 3))

    def batch(step: int) -> Batch:
        x = torch.zeros(2, 1, 5, 5)
        x[:, :, 2, 2] = 1.0
        return {"x": x, "y": randn(2, 1, 8, 8, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=1)


@incident(
    expected=Expected(step=1, phase="loss", op="aten.log", event="nan", sample=1),
    accepted=("SG104", "SG202"),
)
def log_price_of_negative_price(fixed: bool) -> Scene:
    """Targets are log prices, and one day the oil price was below zero."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        data = regression(step)
        data["y"] = data["y"].abs() + 1
        if step == 1:
            data["y"][1] = -37.6
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.huber_loss(model(b["x"]), torch.log(b["y"].clamp_min(0.1) if fixed else b["y"]))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

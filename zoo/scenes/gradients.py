"""Functions that are fine and whose derivative is not; clipping that makes it worse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd


def mse(model: nn.Module, b: Batch) -> Tensor:
    return F.mse_loss(model(b["x"]), b["y"])


class Magnitude(nn.Module):
    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(wave, dim=-1)
        power = spectrum.real.pow(2) + spectrum.imag.pow(2)
        return torch.sqrt(power + self.eps if self.eps else power)


@incident(
    "pytorch/audio#993",
    "speechbrain/speechbrain#181",
    "KinWaiCheuk/nnAudio#138",
    expected=Expected(
        step=1,
        phase="backward",
        module="mag",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=1,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def spectrogram_sqrt_of_silence(fixed: bool) -> Scene:
    """|STFT| as sqrt(re^2 + im^2) is 0 for a silent clip, where the root's slope divides by 0."""
    torch.manual_seed(0)
    model = chain(enhance=nn.Linear(16, 16, bias=False), mag=Magnitude(eps=1e-8 if fixed else 0.0))

    def batch(step: int) -> Batch:
        wave = randn(3, 16, seed=step)
        if step == 1:
            wave[1] = 0
        return {"w": wave, "ref": randn(3, 9, seed=step + 4).abs()}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.l1_loss(model(b["w"]), b["ref"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#23395",
    "pytorch/pytorch#187297",
    "Ciela-Institute/caustics#83",
    expected=Expected(
        step=0,
        phase="backward",
        module="act",
        op="aten.div",
        node="SqrtBackward0",
        event="seen",
        loss_finite=True,
        proof={"transient": ("aten.sqrt", "act")},
    ),
    accepted=("SG402",),
)
def where_sqrt_unselected_branch(fixed: bool) -> Scene:
    """where(x > 0, sqrt(x), 0): the branch that is not taken still sends 0 * NaN back."""
    torch.manual_seed(0)

    def root(x: Tensor) -> Tensor:
        inner = torch.where(x > 0, x, torch.ones_like(x)) if fixed else x
        return torch.where(x > 0, torch.sqrt(inner), torch.zeros_like(x))

    model = chain(fc1=nn.Linear(3, 6), act=Lambda(root), fc2=nn.Linear(6, 1))
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#68425",
    "pytorch/pytorch#156212",
    expected=Expected(
        step=1,
        phase="backward",
        module="act",
        op="aten.mul",
        node="ExpBackward0",
        event="nan",
        sample=2,
        loss_finite=True,
        proof={"transient": ("aten.exp", "act")},
    ),
    accepted=("SG402",),
)
def where_exp_unselected_branch(fixed: bool) -> Scene:
    """An ELU by hand: exp overflows in the branch that is not taken, and backward is 0 * inf."""
    torch.manual_seed(0)

    def elu(x: Tensor) -> Tensor:
        return torch.where(x <= 0, torch.exp(x.clamp(max=0) if fixed else x), 1 + x)

    model = chain(fc1=nn.Linear(3, 4), act=Lambda(elu), fc2=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1:
            data["x"][2] = 400.0
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.smooth_l1_loss(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


class Focal(nn.Module):
    """Binary focal loss with gamma 0.5."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        p, eps = logits.sigmoid(), self.eps
        wanted = y * (1 - p + eps).pow(0.5) * (p + 1e-6).log()
        return -(wanted + (1 - y) * (p + eps).pow(0.5) * (1 - p + 1e-6).log()).mean()


@incident(
    "kornia/kornia#918",
    "kaidic/LDAM-DRW#17",
    expected=Expected(
        step=1,
        phase="backward",
        module="criterion",
        op="aten.pow",
        node="PowBackward0",
        event="inf",
        sample=0,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def focal_loss_pow_gradient(fixed: bool) -> Scene:
    """(1 - p) ** 0.5 has an infinite slope at p = 1."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(2, 1), Focal(eps=1e-6 if fixed else 0.0)
    with torch.no_grad():
        model.weight.fill_(5.0)

    def batch(step: int) -> Batch:
        first = [0.1, 0.1] if step == 0 else [9.0, 9.0]
        return {"x": torch.tensor([first, [-0.2, 0.1]]), "y": torch.tensor([[1.0], [0.0]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["y"])

    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model, 1e-3)
    )


class Gain(nn.Module):
    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.lin, self.gain, self.eps = nn.Linear(3, 1), nn.Parameter(torch.zeros(1)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.sqrt(self.gain + self.eps)


@incident(
    "pytorch/pytorch#46849",
    "hill-a/stable-baselines#1143",
    expected=Expected(
        step=0,
        phase="backward",
        module="",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        loss_finite=True,
        proof={"then": ("aten._foreach_mul_", None)},
    ),
    accepted=("SG401",),
)
def clip_grad_norm_inf_to_nan(fixed: bool) -> Scene:
    """One Inf gradient: clipping multiplies it by 0, which is NaN, and zeroes all the others."""
    torch.manual_seed(0)
    model = Gain(eps=1e-6 if fixed else 0.0)
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model), steps=1, clip=1.0)


@incident(
    "pytorch/pytorch#46849",
    "facebookresearch/fairseq#2384",
    "deepmodeling/deepmd-kit#5519",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten._foreach_norm",
        event="inf",
        loss_finite=True,
        grads_finite=True,
        proof={"zero_grads": True},
    ),
    accepted=("SG501",),
)
def clip_norm_overflow_zeroes_all_grads(fixed: bool) -> Scene:
    """Gradients of 1e20 are finite, their fp32 norm is not: the clipping factor is 0 and nothing is
    learned.
    """
    torch.manual_seed(0)
    model = nn.Linear(100, 1, bias=False)
    factor = 1.0 if fixed else 1e20

    def batch(step: int) -> Batch:
        return {"x": torch.ones(1, 100)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return (model(b["x"]) * factor).sum()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1, clip=1.0)

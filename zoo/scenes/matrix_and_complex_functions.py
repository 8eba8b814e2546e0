"""Matrix functions, complex numbers and special functions at the edge of their domain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd

LABELS = torch.tensor([0, 1, 0, 1])


class Mixing(nn.Module):
    """An invertible mixing of channels, as in Glow, whose weight has turned a mirror into a
    rotation.
    """

    def __init__(self, *, absolute: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.diag(torch.tensor([1.0, 1.0, -0.5])))
        self.absolute = absolute

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = (
            torch.linalg.slogdet(self.weight)[1] if self.absolute else torch.logdet(self.weight)
        )
        return x @ self.weight, volume


@incident(
    "ryanchankh/mcr2#1",
    "jaywalnut310/glow-tts#17",
    expected=Expected(
        step=0, phase="forward", module="", op="aten.where", event="seen", grads_finite=True
    ),
    accepted=("SG202",),
)
def log_determinant_of_a_mirror(fixed: bool) -> Scene:
    """The determinant of the weight is negative; only its absolute value has a logarithm."""
    model = Mixing(absolute=fixed)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        z, volume = model(b["x"])
        return z.pow(2).mean() - volume

    return Scene(model=model, batch=regression, loss=loss, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#49886",
    expected=Expected(
        step=1,
        phase="backward",
        module="basis",
        op="aten.linalg_solve_triangular",
        node="LinalgQrBackward0",
        event="nan",
        sample=2,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def basis_of_dependent_vectors(fixed: bool) -> Scene:
    """Two of the vectors to be made orthogonal are zero: R has a zero on its diagonal."""
    torch.manual_seed(0)
    nudge = 1e-2 * torch.eye(3) if fixed else torch.zeros(3, 3)
    model = chain(
        inp=nn.Linear(3, 3, bias=False), basis=Lambda(lambda x: torch.linalg.qr(x + nudge)[1])
    )

    def batch(step: int) -> Batch:
        x = randn(4, 3, 3, seed=step)
        if step == 1:
            x[2] = 0
        return {"x": x, "y": randn(4, 3, 3, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-3))


class Acyclic(nn.Module):
    """The matrix exponential that punishes cycles in a learned graph."""

    def __init__(self, *, size: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(size * torch.ones(4, 4))

    def forward(self) -> Tensor:
        return torch.linalg.matrix_exp(self.weight * self.weight).diagonal().sum() - 4


@incident(
    expected=Expected(
        step=0, phase="loss", module="criterion", op="aten.linalg_matrix_exp", event="inf"
    ),
    accepted=("SG203",),
)
def cycle_penalty_overflows(fixed: bool) -> Scene:
    """The exponential of a matrix with entries near 49 exceeds float32."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Linear(3, 1), "graph": Acyclic(size=0.5 if fixed else 7.0)})
    criterion = model["graph"]

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model["net"](b["x"]), b["y"]) + criterion()

    return Scene(
        model=model,
        criterion=criterion,
        batch=regression,
        loss=loss,
        optimizer=sgd(model, 1e-6),
        steps=1,
    )


@incident(
    "MakazhanAlpamys/Soup#719",
    expected=Expected(
        step=1,
        phase="backward",
        op="aten.div",
        node="XlogyBackward0",
        event="nan",
        sample=0,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401", "SG201"),
)
def cross_entropy_by_xlogy(fixed: bool) -> Scene:
    """xlogy(0, 0) is 0, but its slope in the second argument is 0 / 0."""
    torch.manual_seed(0)
    model = chain(inp=nn.Linear(3, 2, bias=False), act=Lambda(torch.abs))

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[0] = 0
        return {"x": x, "p": torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        q = model(b["x"]) + (1e-6 if fixed else 0.0)
        return -torch.special.xlogy(b["p"], q).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


@incident(
    expected=Expected(
        step=1,
        phase="backward",
        op="aten.log",
        node="SpecialEntrBackward0",
        event="inf",
        sample=3,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401", "SG202"),
)
def entropy_bonus_of_an_impossible_action(fixed: bool) -> Scene:
    """entr(0) is 0, its slope is infinite: the probability of one action has underflowed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[3] = torch.tensor([0.0, 200.0, 0.0])
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        p = model(b["x"]).softmax(-1)
        return -torch.special.entr(p.clamp_min(1e-8) if fixed else p).sum(-1).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


class Spectrum(nn.Module):
    """Divides a blurred signal by its blur, frequency by frequency."""

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) / (torch.fft.rfft(kernel) + self.floor))


class Deblur(nn.Module):
    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.inp, self.wiener = nn.Linear(8, 8), Spectrum(floor=floor)

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        return self.wiener(self.inp(x), kernel)


@incident(
    expected=Expected(
        step=1, phase="forward", module="wiener", op="aten.div", event="nan", sample=1
    ),
    accepted=("SG201",),
)
def division_by_a_silent_spectrum(fixed: bool) -> Scene:
    """One blur kernel is empty, so every complex quotient is x / 0."""
    torch.manual_seed(0)
    model = Deblur(floor=1e-3 if fixed else 0.0)

    def batch(step: int) -> Batch:
        kernel = torch.eye(8)[:1].repeat(4, 1)
        if step == 1:
            kernel[1] = 0
        return {"x": randn(4, 8, seed=step), "kernel": kernel, "y": randn(4, 8, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"], b["kernel"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Phasor(nn.Module):
    """A complex layer whose output keeps only the phase."""

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(randn(3, 3, seed=1), randn(3, 3, seed=2)))
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex64) @ self.weight
        return torch.view_as_real(z / (z.abs() + self.floor)).flatten(1)


@incident(
    "NEGU93/cvnn#12",
    expected=Expected(
        step=1, phase="forward", module="phasor", op="aten.div", event="nan", sample=3
    ),
    accepted=("SG201",),
)
def phase_of_a_zero_phasor(fixed: bool) -> Scene:
    """Complex weights, a blank sample: z / |z| is 0 / 0."""
    torch.manual_seed(0)
    model = chain(phasor=Phasor(floor=1e-3 if fixed else 0.0), head=nn.Linear(6, 2))

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[3] = 0
        return {"x": x, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "csteinmetz1/auraloss#49",
    expected=Expected(
        step=1, phase="forward", module="cepstrum", op="aten.log", event="inf", sample=2
    ),
    accepted=("SG202",),
)
def complex_cepstrum_of_silence(fixed: bool) -> Scene:
    """The complex logarithm of a zero spectrum."""
    torch.manual_seed(0)
    least = 1e-6 if fixed else 0.0
    model = chain(
        enhance=nn.Linear(8, 8, bias=False),
        cepstrum=Lambda(lambda w: torch.fft.irfft(torch.log(torch.fft.rfft(w) + least))),
    )

    def batch(step: int) -> Batch:
        x = randn(4, 8, seed=step)
        if step == 1:
            x[2] = 0
        return {"x": x, "y": randn(4, 8, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-4))


@incident(
    "pytorch/pytorch#41527",
    expected=Expected(
        step=1, phase="forward", module="norm", op="aten.rsqrt", event="inf", sample=1
    ),
    accepted=("SG201",),
)
def rms_norm_of_a_blank_row_without_epsilon(fixed: bool) -> Scene:
    """nn.RMSNorm with eps 0: the root mean square of a blank row is 0."""
    torch.manual_seed(0)
    model = chain(
        inp=nn.Linear(3, 4, bias=False),
        norm=nn.RMSNorm(4, eps=1e-6 if fixed else 0.0),
        head=nn.Linear(4, 1),
    )

    def batch(step: int) -> Batch:
        b = regression(step)
        if step == 1:
            b["x"][1] = 0
        return b

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model))


class StandardisedConv(nn.Conv2d):
    """A convolution with standardised kernels."""

    least = 0.0

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        spread = flat.std(1, keepdim=True) if flat.shape[1] > 1 or not self.least else flat.abs()
        w = (flat - flat.mean(1, keepdim=True)) / (spread + self.least)
        return F.conv2d(x, w.view_as(self.weight), self.bias, groups=self.groups)


@incident(
    "digantamisra98/EvoNorm#5",
    expected=Expected(step=0, phase="forward", module="point", op="aten.std", event="nan"),
    accepted=("SG205",),
)
def standardised_kernel_of_one_weight(fixed: bool) -> Scene:
    """A depthwise 1x1 kernel holds one weight; its standard deviation does not exist."""
    torch.manual_seed(0)
    model = chain(
        conv=nn.Conv2d(1, 4, 3), point=StandardisedConv(4, 4, 1, groups=4), flat=nn.Flatten()
    )
    model.point.least = 1e-5 if fixed else 0.0

    def batch(step: int) -> Batch:
        return {"x": randn(4, 1, 5, 5, seed=step), "y": randn(4, 36, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#94546",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan"),
    accepted=("SG205", "SG201", "SG102"),
)
def covariance_of_one_observation(fixed: bool) -> Scene:
    """The last batch has one sample: torch.cov divides by N - 1 = 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def batch(step: int) -> Batch:
        return {"x": randn(1 if step == 1 else 4, 3, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        z = model(b["x"])
        return torch.cov(z.T, correction=0 if fixed else 1).pow(2).sum() + z.pow(2).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

"""Space and its equations: splats, kernels below zero, missing boundaries, flows that explode."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import randn, sgd, uniform


def rotations(q: Tensor) -> Tensor:
    """The upper left corner of the matrices of unit quaternions."""
    w, x, y, z = q.unbind(-1)
    top = torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z)], -1)
    return torch.stack([top, torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z)], -1)], -2)


class Splats(nn.Module):
    """Six flat Gaussians: where, how wide, how turned, which colour."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_scale = (
            nn.Parameter(randn(6, 2, seed=1)),
            nn.Parameter(torch.zeros(6, 2)),
        )
        self.quat = nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 0.0]) + 0.1 * randn(6, 4, seed=2))
        self.color, self.opacity = nn.Parameter(uniform(6, 3, seed=3)), nn.Parameter(torch.zeros(6))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Positions and precisions."""
        turned = (
            rotations(self.quat / self.quat.norm(dim=-1, keepdim=True))
            * self.log_scale.exp()[:, None, :]
        )
        return self.mean, torch.linalg.inv(turned @ turned.transpose(1, 2) + 0.05 * torch.eye(2))


class SplatScene(nn.Module):
    """Pixels look through the splats, one after the other, at a background."""

    def __init__(self) -> None:
        super().__init__()
        self.splats, self.background = Splats(), nn.Parameter(torch.full((3,), 0.5))

    def forward(self, pixel: Tensor) -> Tensor:
        mean, precision = self.splats()
        apart = pixel[:, None] - mean
        density = torch.exp(-0.5 * torch.einsum("pni,nij,pnj->pn", apart, precision, apart))
        opaque = (self.splats.opacity.sigmoid() * density).clamp(max=0.99)
        left = torch.cumprod(1 - opaque, 1)
        weight = opaque * torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], 1)
        return weight @ self.splats.color + left[:, -1:] * self.background


@incident(
    "oppo-us-research/SpacetimeGaussians#96",
    "facebookresearch/momentum#589",
    "playcanvas/splat-transform#288",
    expected=Expected(step=3, phase="forward", module="splats", op="aten.div", event="nan"),
    accepted=("SG201",),
)
def splat_zero_quaternion(fixed: bool) -> Scene:
    """Between two steps a splat is reset, and its rotation becomes the quaternion 0, which has no
    direction.
    """
    torch.manual_seed(0)
    model = SplatScene()

    @torch.no_grad()
    def before(step: int) -> None:
        if step == 3:
            model.splats.mean[4] = torch.tensor([0.2, 0.1])
            model.splats.quat[4] = torch.tensor([float(fixed), 0.0, 0.0, 0.0])

    return Scene(
        model=model,
        batch=lambda step: {"pixel": randn(8, 2, seed=step), "color": uniform(8, 3, seed=step + 4)},
        loss=lambda model, b: F.l1_loss(model(b["pixel"]), b["color"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        steps=4,
        before_step=before,
    )


class Matern(nn.Module):
    """A kernel of distances, whose squares are taken apart into three products; `least` keeps them
    above it.
    """

    def __init__(self, *, least: float | None) -> None:
        super().__init__()
        self.log_length, self.least = nn.Parameter(torch.zeros(1)), least

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        square = x.pow(2).sum(-1, keepdim=True) + z.pow(2).sum(-1) - 2 * x @ z.T
        distance = torch.sqrt(square if self.least is None else square.clamp_min(self.least))
        r = distance * math.sqrt(5.0) / self.log_length.exp()
        return (1 + r + r * r / 3) * torch.exp(-r)


class SparseProcess(nn.Module):
    """A Gaussian process on three inducing points."""

    points: Tensor

    def __init__(self, points: Tensor, *, least: float | None) -> None:
        super().__init__()
        self.register_buffer("points", points)
        self.kernel, self.mean = Matern(least=least), nn.Linear(len(points), 1)
        self.log_noise = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(self.kernel(x, self.points))[:, 0], self.log_noise.exp()


@incident(
    "GPflow/GPflow#421",
    "dfm/tinygp#115",
    expected=Expected(
        step=2, phase="forward", module="kernel", op="aten.sqrt", event="nan", sample=3
    ),
    accepted=("SG207",),
)
def matern_negative_squared_distance(fixed: bool) -> Scene:
    """A point almost on an inducing point: the square of their distance is rounded below 0."""
    torch.manual_seed(0)
    points = torch.tensor(
        [[31.554370, 31.554371, 32.363457], [28.318024, 21.845333, -29.127110], [10.1, -3.3, 7.7]]
    )
    model = SparseProcess(points, least=1e-10 if fixed else None)

    def batch(step: int) -> Batch:
        x = points[torch.tensor([0, 1, 2, 2])] + 2 + uniform(4, 3, seed=step)
        if step == 2:
            x[3] = points[2] * (1 + 4e-7)
        return {"x": x, "y": randn(4, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        mean, noise = model(b["x"])
        surprise: Tensor = 0.5 * ((b["y"] - mean) ** 2 / noise + noise.log()).mean()
        return surprise

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)


class SmoothNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(1, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.middle(torch.tanh(self.inner(x)))))
        return out


def slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@incident(
    "lululxvi/deepxde#1338",
    expected=Expected(step=3, phase="loss", op="aten.mse_loss", event="nan", grads_finite=True),
    accepted=("SG102",),
)
def pinn_no_boundary_point(fixed: bool) -> Scene:
    """Collocation points are drawn anew, and one draw has none on the boundary: its error is a mean
    over nothing.
    """
    torch.manual_seed(0)
    model = SmoothNet()

    def batch(step: int) -> Batch:
        x = 0.05 + 0.9 * uniform(10, 1, seed=step)
        if step != 3:
            x[0], x[1] = 0.0, 1.0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        x = b["x"].clone().requires_grad_(True)
        u = model(x)
        residual = (slope(slope(u, x), x) + math.pi**2 * torch.sin(math.pi * x)).pow(2).mean()
        edge = ((b["x"] == 0) | (b["x"] == 1))[:, 0]
        if fixed and not edge.any():
            return residual
        return residual + 10 * F.mse_loss(u[edge], torch.zeros_like(b["x"][edge]))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=4)


class CubicField(nn.Module):
    """A vector field with a cubic part; `bounded` squashes the state first."""

    def __init__(self, *, bounded: bool) -> None:
        super().__init__()
        self.linear, self.cubic, self.bounded = (
            nn.Linear(3, 3),
            nn.Linear(3, 3, bias=False),
            bounded,
        )

    def forward(self, y: Tensor) -> Tensor:
        y = torch.tanh(y) if self.bounded else y
        change: Tensor = self.linear(y) + self.cubic(y**3)
        return change


class IntegratedField(nn.Module):
    """Six steps of Runge-Kutta between an encoder and a decoder."""

    def __init__(self, *, bounded: bool) -> None:
        super().__init__()
        self.encode, self.field, self.decode = (
            nn.Linear(4, 3),
            CubicField(bounded=bounded),
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x)
        for _ in range(6):
            y = self._advance(y, 0.1)
        out: Tensor = self.decode(y)
        return out

    def _advance(self, y: Tensor, dt: float) -> Tensor:
        first = self.field(y)
        second = self.field(y + dt / 2 * first)
        third = self.field(y + dt / 2 * second)
        fourth = self.field(y + dt * third)
        change: Tensor = dt / 6 * (first + 2 * second + 2 * third + fourth)
        return y + change


@incident(
    "rtqichen/torchdiffeq#149",
    "stevenygd/PointFlow#4",
    "patrick-kidger/NeuralCDE#2",
    expected=Expected(
        step=1, phase="forward", module="field", op="aten.pow", event="inf", sample=2
    ),
    accepted=("SG103",),
)
def rk4_cubic_blow_up(fixed: bool) -> Scene:
    """One trajectory starts two hundred times further out than the others; its cube feeds on itself
    within a step.
    """
    torch.manual_seed(0)
    model = IntegratedField(bounded=fixed)

    def batch(step: int) -> Batch:
        x = 0.5 * randn(4, 4, seed=step)
        if step == 1:
            x[2] = torch.tensor([200.0, -200.0, 200.0, 200.0])
        return {"x": x, "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.01))


class Coupling(nn.Module):
    """Half of the coordinates scale and shift the other half; `bounded` keeps the log-scale within
    2.
    """

    def __init__(self, *, flipped: bool, bounded: bool) -> None:
        super().__init__()
        self.flipped, self.bounded = flipped, bounded
        self.inner, self.outer = nn.Linear(2, 16), nn.Linear(16, 4)
        self.net = nn.Sequential(self.inner, nn.ReLU(), self.outer)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, -1)[:: -1 if self.flipped else 1]
        log_scale, shift = checkpoint(self.net, kept, use_reentrant=False).chunk(2, -1)
        if self.bounded:
            log_scale = 2 * torch.tanh(log_scale / 2)
        moved = moved * log_scale.exp() + shift
        halves = [moved, kept] if self.flipped else [kept, moved]
        return torch.cat(halves, -1), log_scale.sum(-1)


class CoupledFlow(nn.Module):
    """Three couplings, of which the second has learned to stretch."""

    def __init__(self, *, bounded: bool) -> None:
        super().__init__()
        first, second, third = (Coupling(flipped=turn == 1, bounded=bounded) for turn in range(3))
        self.flows = nn.ModuleList([first, second, third])
        with torch.no_grad():
            second.inner.bias.zero_()
            first.outer.bias.zero_()
            first.outer.weight *= 0.2
            second.outer.weight[:2] = 45.0 * second.outer.weight[:2].abs()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_volume = torch.zeros(len(x))
        for flow in self.flows:
            x, change = flow(x)
            log_volume = log_volume + change
        return x, log_volume


@incident(
    "VincentStimper/normalizing-flows#73",
    "volflow/DeFlow#4",
    expected=Expected(
        step=1, phase="forward", module="flows.1", op="aten.exp", event="inf", sample=3
    ),
    accepted=("SG203",),
)
def affine_coupling_unbounded_scale(fixed: bool) -> Scene:
    """A point far from the data gets a log-scale above 89 from a network that runs under
    checkpointing.
    """
    torch.manual_seed(0)
    model = CoupledFlow(bounded=fixed)

    def batch(step: int) -> Batch:
        x = 0.05 * randn(4, 4, seed=step)
        if step == 1:
            x[3] = torch.tensor([2.5, -2.0, 6.0, 5.0])
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        latent, log_volume = model(b["x"])
        log_density = (-0.5 * latent.pow(2) - 0.5 * math.log(2 * math.pi)).sum(-1)
        log_likelihood: Tensor = (log_density + log_volume).mean()
        return -log_likelihood

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, clip=5.0)

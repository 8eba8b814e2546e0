"""Space: rays, rotations, splats, graphs with signed edges, an equation solved by a network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, randn, uniform


class Field(nn.Module):
    """Density and colour of a point; outside of the box there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 4))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(points)
        inside = (points.abs() <= 1).all(-1)
        return F.softplus(out[..., 0]) * inside, torch.sigmoid(out[..., 1:])


class ToneMap(nn.Module):
    """sRGB, linear below `KNEE` and a power above it; both branches are computed everywhere."""

    KNEE = 0.0031308

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def forward(self, colour: Tensor) -> Tensor:
        base = colour.clamp_min(self.KNEE) if self.safe else colour
        return torch.where(colour <= self.KNEE, 12.92 * colour, 1.055 * base.pow(1 / 2.4) - 0.055)


class Renderer(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.field, self.tonemap = Field(), ToneMap(safe=safe)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(0, 2, 8)
        density, colour = self.field(origin[:, None] + direction[:, None] * depth[:, None])
        thickness = density * 0.25
        weight = (1 - torch.exp(-thickness)) * torch.exp(-(thickness.cumsum(1) - thickness))
        image: Tensor = self.tonemap((weight[..., None] * colour).sum(1))
        return image


@incident(
    "kornia/kornia#868",
    "kornia/kornia#900",
    expected=Expected(
        step=1,
        phase="backward",
        module="tonemap",
        op="aten.pow",
        node="PowBackward0",
        event="inf",
        sample=2,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG402",),
)
def tonemap_srgb_of_black_ray(fixed: bool) -> Scene:
    """A ray that misses the scene is black; the power that `where` does not take has an infinite
    slope at 0.
    """
    torch.manual_seed(0)
    model = Renderer(safe=fixed)

    def batch(step: int) -> Batch:
        origin = torch.tensor(
            [[0.0, 0.0, -1.0], [0.2, 0.0, -1.0], [-0.3, 0.1, -1.0], [0.0, 0.4, -1.0]]
        )
        direction = torch.tensor([[0.0, 0.0, 1.0]]).repeat(4, 1)
        if step == 1:
            origin[2] = torch.tensor([3.0, 0.0, -1.0])
        return {"origin": origin, "direction": direction, "rgb": uniform(4, 3, seed=step)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.mse_loss(model(b["origin"], b["direction"]), b["rgb"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15),
    )


class Orthogonalise(nn.Module):
    """The nearest rotation by SVD, or two columns by Gram and Schmidt."""

    def __init__(self, *, by_columns: bool) -> None:
        super().__init__()
        self.by_columns = by_columns

    def forward(self, matrix: Tensor) -> Tensor:
        if not self.by_columns:
            left, _, right = torch.linalg.svd(matrix)
            nearest: Tensor = left @ right
            return nearest
        x = F.normalize(matrix[:, 0], dim=-1)
        y = F.normalize(matrix[:, 1] - (x * matrix[:, 1]).sum(-1, keepdim=True) * x, dim=-1)
        return torch.stack([x, y, torch.linalg.cross(x, y)], 1)


class Pose(nn.Module):
    """A rotation that starts at the identity."""

    def __init__(self, *, by_columns: bool) -> None:
        super().__init__()
        self.encode, self.rotation = nn.Linear(6, 12), nn.Linear(12, 9)
        self.ortho = Orthogonalise(by_columns=by_columns)
        nn.init.zeros_(self.rotation.weight)
        with torch.no_grad():
            self.rotation.bias.copy_(torch.eye(3).flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ortho(self.rotation(self.encode(x).tanh()).view(-1, 3, 3))
        return out


@incident(
    "hassony2/manopth#32",
    "pytorch/pytorch#49886",
    "Pzoom522/ProcrustEs-KGE#2",
    expected=Expected(
        step=0,
        phase="backward",
        module="ortho",
        op="aten.div",
        node="LinalgSvdBackward0",
        event="nan",
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def rotation_head_svd_at_identity(fixed: bool) -> Scene:
    """The head starts at the identity: three equal singular values, whose differences the slope
    divides by.
    """
    torch.manual_seed(0)
    model = Pose(by_columns=fixed)

    def rotate(rotation: Tensor, points: Tensor) -> Tensor:
        return torch.einsum("bij,bnj->bni", rotation, points)

    def batch(step: int) -> Batch:
        points = randn(3, 7, 3, seed=step)
        turn, _ = torch.linalg.qr(randn(3, 3, 3, seed=step + 5))
        return {"x": randn(3, 6, seed=step + 1), "points": points, "target": rotate(turn, points)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.mse_loss(rotate(model(b["x"]), b["points"]), b["target"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        steps=1,
    )


class Splats(nn.Module):
    """Soft discs in the plane, blended front to back."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(uniform(6, 2, seed=1))
        self.log_size = nn.Parameter(torch.full((6,), -1.0))
        self.opacity = nn.Parameter(torch.full((6,), -0.5))
        self.colour = nn.Parameter(randn(6, 3, seed=2))

    def forward(self, pixel: Tensor) -> Tensor:
        square = (pixel[:, None] - self.place).pow(2).sum(-1)
        thickness = F.softplus(self.opacity) * torch.exp(-0.5 * square / (2 * self.log_size).exp())
        weight = (1 - torch.exp(-thickness)) * torch.exp(-(thickness.cumsum(1) - thickness))
        return weight @ self.colour.sigmoid()


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.splats, self.exposure = Splats(), nn.Parameter(torch.ones(3))

    def forward(self, pixel: Tensor) -> Tensor:
        out: Tensor = self.splats(pixel) * self.exposure
        return out


@incident(
    "kcheng1021/GaussianPro#87",
    expected=Expected(
        step=3, phase="state", module="splats", op="aten.softplus", event="param:splats.opacity"
    ),
    accepted=("SG601",),
)
def splat_opacity_logit_of_one(fixed: bool) -> Scene:
    """Densification after step 2 gives new splats the opacity 1, whose logit is infinite."""
    torch.manual_seed(0)
    model = Picture()

    def densify(step: int) -> None:
        if step == 2:
            opaque = torch.full((2,), 0.99 if fixed else 1.0)
            with torch.no_grad():
                model.splats.opacity[:2] = torch.log(opaque / (1 - opaque))

    return Scene(
        model=model,
        batch=lambda step: {"pixel": uniform(8, 2, seed=step), "rgb": uniform(8, 3, seed=step + 1)},
        loss=lambda model, b: F.l1_loss(model(b["pixel"]), b["rgb"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        steps=4,
        after_step=densify,
    )


class GraphConvolution(nn.Module):
    """Weights of edges are normalised by degree ** -0.5; isolated nodes are patched, negative
    degrees are not.
    """

    ROW = torch.tensor([0, 1, 1, 2, 2, 3, 3, 0, 0, 2])
    COLUMN = torch.tensor([1, 0, 2, 1, 3, 2, 0, 3, 2, 0])

    def __init__(self, inputs: int, *, absolute: bool) -> None:
        super().__init__()
        self.lin, self.absolute = nn.Linear(inputs, 8, bias=False), absolute

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weights = edges.abs() if self.absolute else edges
        scale = torch.zeros(x.shape[:2]).index_add(1, self.ROW, weights).pow(-0.5)
        scale[scale == INF] = 0
        norm = scale[:, self.ROW] * edges * scale[:, self.COLUMN]
        hidden = self.lin(x)
        return torch.zeros_like(hidden).index_add(
            1, self.COLUMN, norm[..., None] * hidden[:, self.ROW]
        )


class SmallGraph(nn.Module):
    def __init__(self, *, absolute: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GraphConvolution(inputs, absolute=absolute) for inputs in (3, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edges).relu()
        out: Tensor = self.out(x.mean(1))
        return out


@incident(
    "pyg-team/pytorch_geometric#61",
    expected=Expected(
        step=2, phase="forward", module="convs.0", op="aten.pow", event="nan", sample=1
    ),
    accepted=("SG207",),
)
def gcn_negative_edge_weights(fixed: bool) -> Scene:
    """Correlations as edge weights: one node's degree is negative, and its inverse root NaN."""
    torch.manual_seed(0)
    model = SmallGraph(absolute=fixed)

    def batch(step: int) -> Batch:
        edges = uniform(3, 10, seed=step) + 0.1
        if step == 2:
            edges[1, :4] = -0.9
        return {"x": randn(3, 4, 3, seed=step), "edges": edges, "y": torch.tensor([0, 1, 1])}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["x"], b["edges"]), b["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4),
        steps=3,
    )


class Solution(nn.Module):
    """A network u(x, t) that is positive where it has been trained."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.hidden.weight.abs_()
            self.out.weight.fill_(0.5)
            self.out.bias.fill_(1.0)

    def forward(self, point: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(point).tanh())
        return out


class PorousMedium(nn.Module):
    """The residual of u_t = (u^1.2)_xx at each point, by derivatives of a function."""

    def __init__(self, *, least: float | None) -> None:
        super().__init__()
        self.least = least

    def forward(self, net: nn.Module, points: Tensor) -> Tensor:
        weights: Batch = dict(net.named_parameters())

        def u(point: Tensor) -> Tensor:
            value: Tensor = functional_call(net, weights, (point,)).squeeze()
            return value

        def power(point: Tensor) -> Tensor:
            value = u(point)
            return (value if self.least is None else value.clamp_min(self.least)) ** 1.2

        def residual(point: Tensor) -> Tensor:
            difference: Tensor = grad(u)(point)[1] - grad(lambda at: grad(power)(at)[0])(point)[0]
            return difference

        return vmap(residual)(points).pow(2).mean()


@incident(
    "prateekbhustali/Physics-Informed-Neural-Networks#1",
    "lululxvi/deepxde#1177",
    "lululxvi/deepxde#428",
    expected=Expected(
        step=3, phase="loss", module="criterion", op="aten.pow", event="nan", sample=2
    ),
    accepted=("SG207",),
)
def pinn_fractional_power_of_negative_u(fixed: bool) -> Scene:
    """At one collocation point the network is negative, and so u^1.2 is NaN, deep inside two
    derivatives.
    """
    torch.manual_seed(0)
    model, criterion = Solution(), PorousMedium(least=1e-3 if fixed else None)

    def batch(step: int) -> Batch:
        points = uniform(5, 2, seed=step)
        if step == 3:
            points[2, 0] = -30.0
        return {"points": points, "start": torch.ones(5)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        start = F.mse_loss(model(b["points"] * 0).squeeze(-1), b["start"])
        inside: Tensor = criterion(model, b["points"])
        return start + inside

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=optimizer, steps=4
    )

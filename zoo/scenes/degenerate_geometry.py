"""Boxes, rays, angles and distances: a coordinate that is exactly degenerate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import Lambda, chain, randn, sgd

LABELS = torch.tensor([0, 1, 2, 1])


@incident(
    "ultralytics/yolov5#13416",
    "ultralytics/yolov5#8539",
    expected=Expected(step=1, phase="loss", op="aten.div", event="inf", sample=1, loss_finite=True),
    accepted=("SG403", "SG201"),
)
def aspect_ratio_of_a_flat_box(fixed: bool) -> Scene:
    """CIoU compares atan(w / h): a box without height gives atan(inf), fine forward and NaN
    backward.
    """
    torch.manual_seed(0)
    model = chain(head=nn.Linear(3, 2, bias=False), act=nn.ReLU())
    with torch.no_grad():
        model.head.weight.abs_()

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step).abs() + 0.1
        if step == 1:
            x[1] = torch.linalg.lstsq(
                model.head.weight.detach(), torch.tensor([1.0, -1.0])
            ).solution
        return {"x": x, "y": torch.tensor([1.0, 0.5, 2.0, 1.0])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        w, h = model(b["x"]).unbind(-1)
        return F.mse_loss(torch.atan(w / (h + (1e-4 if fixed else 0.0))), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


class Warp(nn.Module):
    """Samples an image at projected points."""

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, image: Tensor, points: Tensor) -> Tensor:
        depth = points[..., 2:]
        plane = points[..., :2] / (depth.clamp_min(self.floor) if self.floor else depth)
        return F.grid_sample(image, plane.view(len(image), 1, -1, 2), align_corners=False)


class Reprojection(nn.Module):
    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.pose, self.warp = nn.Linear(3, 3, bias=False), Warp(floor=floor)
        with torch.no_grad():
            self.pose.weight.copy_(torch.eye(3))

    def forward(self, image: Tensor, points: Tensor) -> Tensor:
        return self.warp(image, self.pose(points))


@incident(
    expected=Expected(step=0, phase="forward", module="warp", op="aten.div", event="inf", sample=2),
    accepted=("SG201",),
)
def point_in_the_camera_plane(fixed: bool) -> Scene:
    """A point of depth 0 projects to infinity; the sampler makes NaN of it."""
    torch.manual_seed(0)
    model = Reprojection(floor=1e-2 if fixed else 0.0)

    def batch(step: int) -> Batch:
        points = randn(4, 5, 3, seed=step) * 0.2
        points[..., 2] = 1.0
        points[2, 3] = torch.tensor([0.5, 0.5, 0.0])
        return {
            "image": randn(4, 1, 6, 6, seed=step),
            "points": points,
            "y": randn(4, 1, 1, 5, seed=step + 1),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["image"], b["points"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3), steps=1)


class Margin(nn.Module):
    """An additive angular margin."""

    def __init__(self, *, slack: float) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.eye(3))
        self.slack = slack

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.normalize(x) @ F.normalize(self.classes).T
        sine = torch.sqrt(1 - cosine.pow(2) + self.slack)
        shifted = cosine * 0.9 - sine * 0.4
        return F.cross_entropy(torch.where(F.one_hot(y, 3) > 0, shifted, cosine) * 4, y)


@incident(
    "ronghuaiyang/arcface-pytorch#91",
    "ZhaoJ9014/face.evoLVe#117",
    expected=Expected(
        step=1,
        phase="backward",
        module="criterion",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=2,
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def margin_at_a_perfect_match(fixed: bool) -> Scene:
    """A face equal to its class centre: the sine of the angle is sqrt(0)."""
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    criterion = Margin(slack=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        x = torch.tensor([[1.0, 0.5, 0.2], [0.3, 1.0, 0.1], [0.2, 0.1, 1.0], [0.4, 1.0, 0.2]])
        if step == 1:
            x[2] = torch.tensor([0.0, 0.0, 2.0])
        return {"x": x, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["y"])

    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model, 1e-9)
    )


@incident(
    "facebookresearch/pytorch3d#119",
    expected=Expected(
        step=0,
        phase="backward",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def distances_clamped_before_the_root(fixed: bool) -> Scene:
    """All pairs by hand: the diagonal is clamped to 0 and then rooted."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)

    def loss(model: nn.Module, b: Batch) -> Tensor:
        z = model(b["x"])
        square = z.pow(2).sum(1)
        pairs = square[:, None] + square[None] - 2 * z @ z.T
        distance = (pairs.clamp(min=1e-8 if fixed else 0.0) * (1 - torch.eye(4))).add(
            torch.eye(4) * (1e-8 if fixed else 0.0)
        )
        return F.relu(1 - distance.sqrt()).mean()

    return Scene(
        model=model,
        batch=lambda step: {"x": randn(4, 3, seed=step)},
        loss=loss,
        optimizer=sgd(model),
        steps=1,
    )


@incident(
    expected=Expected(step=1, phase="forward", module="pool", op="aten.pow", event="nan", sample=0),
    accepted=("SG207",),
)
def generalised_mean_of_negative_activations(fixed: bool) -> Scene:
    """GeM pooling with a learned exponent and no clamp behind a layer without ReLU."""
    torch.manual_seed(0)
    model = chain(
        conv=nn.Conv1d(1, 2, 3, bias=False),
        pool=PowerMean(least=1e-6 if fixed else None),
        head=nn.Linear(2, 2),
    )
    with torch.no_grad():
        model.conv.weight.abs_()

    def batch(step: int) -> Batch:
        x = randn(4, 1, 8, seed=step).abs() + 0.1
        if step == 1:
            x[0] = -x[0]
        return {"x": x, "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class PowerMean(nn.Module):
    """(mean x^p)^(1/p) with a learned p."""

    def __init__(self, *, least: float | None) -> None:
        super().__init__()
        self.p, self.least = nn.Parameter(torch.tensor(2.7)), least

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.least is None else x.clamp_min(self.least)
        return x.pow(self.p).mean(-1).pow(1 / self.p)


@incident(
    expected=Expected(step=1, phase="loss", op="aten.remainder", event="nan", sample=2),
    accepted=("SG201",),
)
def phase_wrapped_by_a_period_of_zero(fixed: bool) -> Scene:
    """t modulo period, and one star of the catalogue has no period."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        period = torch.tensor([1.0, 2.0, 0.5, 3.0])
        if step == 1:
            period[2] = 0
        return {
            "x": randn(4, 3, seed=step),
            "t": torch.tensor([3.3, 4.1, 1.7, 2.2]),
            "period": period,
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        period = b["period"].clamp_min(1e-3) if fixed else b["period"]
        return F.mse_loss(model(b["x"]).squeeze(-1), torch.remainder(b["t"], period))

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Radial(nn.Module):
    """A potential that depends on the distance from the origin; its force is asked for."""

    def __init__(self, *, soft: float) -> None:
        super().__init__()
        self.radius = Lambda(lambda x: torch.sqrt(x.pow(2).sum(-1, keepdim=True) + soft))
        self.net = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.radius(x)).tanh()


@incident(
    "kornia/kornia#2924",
    expected=Expected(
        step=1,
        phase="backward",
        module="radius",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=1,
    ),
    accepted=("SG401",),
)
def force_at_the_origin(fixed: bool) -> Scene:
    """The force is a gradient inside the loss; at the origin the radius has none."""
    torch.manual_seed(0)
    model = Radial(soft=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[1] = 0
        return {"x": x, "force": randn(4, 3, seed=step + 1)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        x = b["x"].clone().requires_grad_()
        force = -torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return F.mse_loss(force, b["force"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "kornia/kornia#4007",
    expected=Expected(
        step=0,
        phase="backward",
        op="aten.rsqrt",
        node="AcosBackward0",
        event="inf",
        loss_finite=True,
        proof={"backward_only": True},
    ),
    accepted=("SG401",),
)
def logarithm_of_the_identity_rotation(fixed: bool) -> Scene:
    """v * acos(w) / |v| at the identity: the clamp keeps the value, the slope is 0 * inf."""

    class Pose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotation = nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 0.0]))

    model, bound = Pose(), 1 - 1e-6 if fixed else 1.0

    def loss(model: nn.Module, b: Batch) -> Tensor:
        w, v = model.rotation[:1], model.rotation[1:]
        log = v * torch.acos(w.clamp(-bound, bound)) / v.norm().clamp_min(1e-8)
        return F.mse_loss(log.expand_as(b["y"]), b["y"])

    return Scene(
        model=model,
        batch=lambda step: {"y": randn(4, 3, seed=step)},
        loss=loss,
        optimizer=sgd(model, 1e-9),
        steps=1,
    )

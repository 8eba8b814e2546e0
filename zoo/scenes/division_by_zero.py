"""Divisions by a zero that was measured or learned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd, tokens

LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


@incident(
    "InsaneLife/dssm#17",
    "BaseIntelligence/bounty-challenge#5301",
    expected=Expected(step=1, phase="forward", module="unit", op="aten.div", event="nan", sample=3),
    accepted=("SG201",),
)
def embedding_of_zero_length_normalised(fixed: bool) -> Scene:
    """x / |x| of a sample whose features are all zero, behind a layer without bias."""
    torch.manual_seed(0)

    def unit(x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        return x / (norm.clamp_min(1e-6) if fixed else norm)

    model = chain(encode=nn.Linear(3, 4, bias=False), unit=Lambda(unit), head=nn.Linear(4, 2))

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[3] = 0
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))


@incident(
    "facebookresearch/pytorch_GAN_zoo#89",
    expected=Expected(
        step=1, phase="forward", module="stretch", op="aten.div", event="nan", sample=0
    ),
    accepted=("SG201",),
)
def min_max_stretch_of_constant_image(fixed: bool) -> Scene:
    """(x - min) / (max - min) of an image that has one colour only."""
    torch.manual_seed(0)

    def stretch(x: Tensor) -> Tensor:
        low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
        return (x - low) / ((high - low).clamp_min(1e-6) if fixed else high - low)

    model = chain(
        stretch=Lambda(stretch),
        conv=nn.Conv2d(1, 4, 3),
        norm=nn.GroupNorm(2, 4),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(4, 2),
    )

    def batch(step: int) -> Batch:
        x = randn(4, 1, 6, 6, seed=step)
        if step == 1:
            x[0] = 0.5
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))


@incident(
    "pyg-team/pytorch_geometric#61",
    "mlx-graphs/mlx-graphs#18",
    expected=Expected(step=1, phase="forward", module="conv", op="aten.pow", event="inf"),
    accepted=("SG201",),
)
def gcn_isolated_node(fixed: bool) -> Scene:
    """degree ** -0.5 of a node without edges is infinite, and 0 * inf spreads through the adjacency
    product.
    """
    torch.manual_seed(0)

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            degree = edges.sum(-1)
            scale = (degree.clamp_min(1) if fixed else degree).pow(-0.5)
            return (scale[:, None] * edges * scale[None, :]) @ self.lin(x)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = Convolution(), nn.Linear(4, 2)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.head(self.conv(x, edges).relu())

    model = Graph()

    def batch(step: int) -> Batch:
        edges = torch.ones(4, 4) - torch.eye(4)
        if step == 1:
            edges[2], edges[:, 2] = 0, 0
        return {"x": randn(4, 3, seed=step), "edges": edges, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["edges"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "TiankaiHang/Min-SNR-Diffusion-Training#4",
    "Nerogar/OneTrainer#212",
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan", sample=2),
    accepted=("SG201",),
)
def min_snr_weight_at_zero_terminal_snr(fixed: bool) -> Scene:
    """min(snr, 5) / snr at the last timestep of a schedule rescaled to zero terminal SNR: 0 / 0."""
    torch.manual_seed(0)
    model = chain(inp=nn.Linear(3, 8), act=nn.SiLU(), out=nn.Linear(8, 3))
    alphas = torch.linspace(0.999, 0.0, 10)

    def batch(step: int) -> Batch:
        t = torch.tensor([1, 4, 9 if step == 1 else 8, 6])
        return {"x": randn(4, 3, seed=step), "t": t, "noise": randn(4, 3, seed=step + 5)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        alpha = alphas[b["t"]]
        snr = alpha / (1 - alpha)
        noisy = alpha.sqrt()[:, None] * b["x"] + (1 - alpha).sqrt()[:, None] * b["noise"]
        weight = snr.clamp(max=5.0) / (snr.clamp_min(1e-6) if fixed else snr)
        return (weight * F.mse_loss(model(noisy), b["noise"], reduction="none").mean(1)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#19126",
    expected=Expected(
        step=0,
        phase="forward",
        module="lin.parametrizations.weight.0",
        op="aten._weight_norm_interface",
        event="nan",
    ),
    accepted=("SG201",),
)
def weight_norm_of_zero_row(fixed: bool) -> Scene:
    """Zero initialisation of the last layer under weight normalisation: g * v / |v| is 0 / 0."""
    torch.manual_seed(0)
    last = nn.Linear(4, 2)
    nn.init.zeros_(last.weight) if not fixed else nn.init.normal_(last.weight, std=1e-3)
    model = chain(inp=nn.Linear(3, 4), lin=weight_norm(last))
    return Scene(
        model=model,
        batch=lambda step: {"x": randn(4, 3, seed=step), "y": LABELS},
        loss=classify,
        optimizer=sgd(model),
        steps=1,
    )


@incident(
    "pytorch/pytorch#20192",
    expected=Expected(
        step=0,
        phase="forward",
        module="critic.parametrizations.weight.0",
        op="aten.div",
        event="nan",
    ),
    accepted=("SG201",),
)
def spectral_norm_of_zero_weight(fixed: bool) -> Scene:
    """The spectral norm of a zero-initialised layer is 0, whatever the power iteration does."""
    torch.manual_seed(0)
    last = nn.Linear(4, 1)
    if not fixed:
        nn.init.zeros_(last.weight)
    model = chain(inp=nn.Linear(3, 4), critic=spectral_norm(last))
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model), steps=1)


@incident(
    "LiuLei95/PyTorch-Learned-Image-Compression-with-GMM-and-Attention#8",
    expected=Expected(step=1, phase="loss", op="aten.div", event="inf", sample=1),
    accepted=("SG201",),
)
def gaussian_likelihood_with_zero_scale(fixed: bool) -> Scene:
    """A predicted scale passes through ReLU and is 0: (x - mean) / scale is infinite."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.copy_(torch.tensor([0.0, 1.0]))

    def batch(step: int) -> Batch:
        x = torch.tensor([[0.1, 0.5], [0.3, 0.2], [-0.2, 0.7]])
        if step == 1:
            x[1, 1] = -3.0
        return {"x": x, "y": randn(3, 1, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        mean, scale = model(b["x"]).chunk(2, -1)
        scale = scale.relu() + (1e-3 if fixed else 0.0)
        z = (b["y"] - mean) / scale
        return (0.5 * z.pow(2) + scale.clamp_min(1e-6).log()).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "mihaidusmanu/d2-net#78",
    "mihaidusmanu/d2-net#57",
    expected=Expected(
        step=1, phase="forward", module="detect", op="aten.div", event="nan", sample=1
    ),
    accepted=("SG201",),
)
def descriptor_divided_by_its_maximum(fixed: bool) -> Scene:
    """Soft detection divides each map by its channel maximum, which is 0 where ReLU killed every
    channel.
    """
    torch.manual_seed(0)

    def detect(x: Tensor) -> Tensor:
        top = x.amax(1, keepdim=True)
        return x / (top + 1e-8 if fixed else top)

    model = chain(
        conv=nn.Conv2d(1, 3, 3, bias=False),
        act=nn.ReLU(),
        detect=Lambda(detect),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(3, 2),
    )
    nn.init.uniform_(model.conv.weight, 0.1, 1.0)

    def batch(step: int) -> Batch:
        x = randn(4, 1, 5, 5, seed=step).abs() + 0.1
        if step == 1:
            x[1] = -1.0
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))


@incident(
    "rickgroen/cov-weighting#3",
    expected=Expected(step=2, phase="loss", op="aten.div", event="nan", grads_finite=True),
    accepted=("SG201",),
)
def loss_divided_by_its_own_mean(fixed: bool) -> Scene:
    """Loss terms are weighed by relative size; an auxiliary hinge term has reached exactly 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def batch(step: int) -> Batch:
        data = regression(step)
        data["margin"] = torch.full((4, 1), -50.0 if step == 2 else 5.0)
        return data

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        terms = torch.stack([F.mse_loss(out, b["y"]), F.relu(out.abs() + b["margin"]).mean()])
        return (terms / (terms.detach() + (1e-8 if fixed else 0.0))).sum()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@incident(
    "open-mmlab/mmdetection#3315",
    expected=Expected(
        step=1,
        phase="loss",
        module="criterion",
        op="aten.div",
        event="nan",
        sample=0,
        grads_finite=True,
    ),
    accepted=("SG201", "SG104"),
)
def iou_of_two_empty_boxes(fixed: bool) -> Scene:
    """Prediction and annotation both have no area: intersection over union is 0 / 0."""
    torch.manual_seed(0)

    class IoULoss(nn.Module):
        def forward(self, size: Tensor, wanted: Tensor) -> Tensor:
            inter = torch.minimum(size, wanted).prod(-1)
            union = size.prod(-1) + wanted.prod(-1) - inter
            return (1 - inter / (union + (1e-7 if fixed else 0.0))).mean()

    model, criterion = chain(size=nn.Linear(2, 2), act=nn.ReLU()), IoULoss()
    with torch.no_grad():
        model.size.weight.copy_(torch.eye(2))
        model.size.bias.zero_()

    def batch(step: int) -> Batch:
        x = randn(3, 2, seed=step).abs() + 0.2
        wanted = torch.tensor([[1.0, 2.0], [0.5, 0.5], [2.0, 1.0]])
        if step == 1:
            x[0], wanted[0] = -1.0, 0.0
        return {"x": x, "wanted": wanted}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return criterion(model(b["x"]), b["wanted"])

    return Scene(model=model, criterion=criterion, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.reciprocal", event="inf"),
    accepted=("SG201", "SG102"),
)
def inverse_frequency_of_absent_class(fixed: bool) -> Scene:
    """Class weights 1 / count, normalised to sum 1: a class that is not in the batch makes them inf
    / inf.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(12, 3))

    def batch(step: int) -> Batch:
        return {"ids": tokens(4, 3, seed=step), "y": torch.tensor([0, 1, 0 if step == 1 else 2, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        counts = torch.bincount(b["y"], minlength=3)
        weights = 1.0 / (counts.clamp_min(1) if fixed else counts)
        return F.cross_entropy(model(b["ids"]), b["y"], weight=weights / weights.sum())

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

"""Singular derivatives, and values that forward swallows and backward does not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.log_and_root_domains import eye_linear
from zoo.scenes.parts import Lambda, chain, randn, regression, sgd, tokens

BACKWARD = {"phase": "backward", "loss_finite": True}
ONLY = {"backward_only": True}


@incident(
    "pytorch/pytorch#4605",
    "banctilrobitaille/torch-vectorized#7",
    expected=Expected(
        step=1, op="aten.rsqrt", node="AcosBackward0", event="inf", sample=0, proof=ONLY, **BACKWARD
    ),
    accepted=("SG401",),
)
def angle_between_equal_vectors(fixed: bool) -> Scene:
    """acos of a cosine that is exactly 1 is fine, its slope is infinite."""
    torch.manual_seed(0)
    model = eye_linear()

    def batch(step: int) -> Batch:
        x = torch.tensor([[0.6, 0.8], [1.0, 0.0], [0.0, 1.0]])
        y = torch.tensor([[0.8, 0.6], [0.6, 0.8], [0.8, 0.6]])
        if step == 1:
            x[0], y[0] = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])
        return {"x": x, "y": y}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        cosine = (model(b["x"]) * b["y"]).sum(-1)
        return torch.acos(cosine.clamp(-0.999, 0.999) if fixed else cosine).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.0))


class Whitening(nn.Module):
    """Decorrelates features with the eigenvectors of their covariance."""

    def __init__(self, *, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter

    def forward(self, x: Tensor) -> Tensor:
        covariance = x.T @ x + self.jitter * torch.diag(torch.arange(1.0, x.shape[1] + 1))
        values, vectors = torch.linalg.eigh(covariance)
        return x @ vectors / (values + 1e-3).sqrt()


@incident(
    "pytorch/pytorch#76531",
    "pytorch/pytorch#23133",
    expected=Expected(
        step=0,
        module="whiten",
        op="aten.div_",
        node="LinalgEighBackward0",
        event="inf",
        proof=ONLY,
        **BACKWARD,
    ),
    accepted=("SG401",),
)
def whitening_with_equal_eigenvalues(fixed: bool) -> Scene:
    """A perfectly white batch: equal eigenvalues, whose eigenvectors have no derivative."""
    torch.manual_seed(0)
    model = chain(
        inp=eye_linear(size=3), whiten=Whitening(jitter=0.01 if fixed else 0.0), out=nn.Linear(3, 1)
    )

    def batch(step: int) -> Batch:
        return {"x": torch.eye(3), "y": randn(3, 1, seed=step)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#49886",
    "KinglittleQ/torch-batch-svd#5",
    expected=Expected(
        step=0,
        module="rotate",
        op="aten.div",
        node="LinalgSvdBackward0",
        event="inf",
        proof=ONLY,
        **BACKWARD,
    ),
    accepted=("SG401",),
)
def procrustes_of_symmetric_points(fixed: bool) -> Scene:
    """The SVD of a covariance with equal singular values: U is fine, its slope is not."""
    torch.manual_seed(0)

    def rotate(x: Tensor) -> Tensor:
        spread = x.T @ x + (0.1 * torch.diag(torch.tensor([1.0, 2.0])) if fixed else 0.0)
        u, s, _ = torch.linalg.svd(spread)
        return x @ u * s

    model = chain(inp=eye_linear(), rotate=Lambda(rotate), out=nn.Linear(2, 1))

    def batch(step: int) -> Batch:
        return {"x": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "y": randn(2, 1, seed=step)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#19126",
    expected=Expected(
        step=1, op="aten.div", node="SqrtBackward0", event="inf", sample=2, proof=ONLY, **BACKWARD
    ),
    accepted=("SG401",),
)
def triplet_with_identical_embeddings(fixed: bool) -> Scene:
    """Euclidean distance by hand: sqrt(sum of squares) of two equal embeddings has no slope."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Flatten())

    def batch(step: int) -> Batch:
        anchor, positive = torch.tensor([[1], [2], [3]]), torch.tensor([[4], [5], [6]])
        if step == 1:
            positive[2] = 3
        return {"anchor": anchor, "positive": positive, "negative": tokens(3, 1, seed=step, low=7)}

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return torch.sqrt((a - b).pow(2).sum(-1) + (1e-8 if fixed else 0.0))

    def loss(model: nn.Module, b: Batch) -> Tensor:
        anchor, positive, negative = (model(b[k]) for k in ("anchor", "positive", "negative"))
        return F.relu(9.0 + distance(anchor, positive) - distance(anchor, negative)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#19126",
    expected=Expected(
        step=1, op="aten.div", node="SqrtBackward0", event="inf", sample=1, proof=ONLY, **BACKWARD
    ),
    accepted=("SG401",),
)
def knowledge_graph_with_sparse_embeddings(fixed: bool) -> Scene:
    """TransE with a sparse embedding: head + relation equals tail exactly for a self-loop of
    relation 0.
    """
    torch.manual_seed(0)
    model = nn.Embedding(8, 4, sparse=True)
    with torch.no_grad():
        model.weight[0] = 0

    def batch(step: int) -> Batch:
        triple = torch.tensor([[1, 5, 2], [3, 6, 4], [2, 5, 1]])
        if step == 1:
            triple[1] = torch.tensor([3, 0, 3])
        return {"triple": triple}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        head, relation, tail = model(b["triple"]).unbind(1)
        return torch.sqrt((head + relation - tail).pow(2).sum(-1) + (1e-8 if fixed else 0.0)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "pytorch/pytorch#4605",
    expected=Expected(
        step=1,
        op="aten.rsqrt",
        node="AcoshBackward0",
        event="inf",
        sample=1,
        proof=ONLY,
        **BACKWARD,
    ),
    accepted=("SG401",),
)
def hyperbolic_distance_of_a_point_to_itself(fixed: bool) -> Scene:
    """Poincare distance acosh(1 + ...) of two equal points: acosh has an infinite slope at 1."""
    torch.manual_seed(0)
    model = nn.Embedding(6, 2)
    with torch.no_grad():
        model.weight.mul_(0.1)

    def batch(step: int) -> Batch:
        return {"pair": torch.tensor([[0, 1], [2, 2 if step == 1 else 3], [4, 5]])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        u, v = model(b["pair"]).unbind(1)
        gap = 2 * (u - v).pow(2).sum(-1) / ((1 - u.pow(2).sum(-1)) * (1 - v.pow(2).sum(-1)))
        return torch.acosh(1 + gap + (1e-6 if fixed else 0.0)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "speechbrain/speechbrain#181",
    expected=Expected(
        step=1,
        module="std",
        op="aten.div",
        node="SqrtBackward0",
        event="inf",
        sample=0,
        proof=ONLY,
        **BACKWARD,
    ),
    accepted=("SG401",),
)
def contrast_as_root_of_variance(fixed: bool) -> Scene:
    """var().sqrt() of a constant frame, unlike std(), has no guard in its backward."""
    torch.manual_seed(0)

    def contrast(x: Tensor) -> Tensor:
        variance = x.var(-1)
        return torch.sqrt(variance + 1e-8 if fixed else variance)

    model = chain(conv=nn.Conv1d(1, 2, 3, bias=False), std=Lambda(contrast), head=nn.Linear(2, 1))

    def batch(step: int) -> Batch:
        x = randn(3, 1, 12, seed=step)
        if step == 1:
            x[0] = 0.0
        return {"x": x, "y": randn(3, 1, seed=step + 1)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#98276",
    expected=Expected(
        step=1, op="aten.div", node="HypotBackward0", event="nan", sample=2, proof=ONLY, **BACKWARD
    ),
    accepted=("SG401",),
)
def hypotenuse_of_no_flow(fixed: bool) -> Scene:
    """End-point error of optical flow by hypot(u, v): where both are 0 the slope is 0 / 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)

    def batch(step: int) -> Batch:
        x = randn(3, 3, seed=step)
        if step == 1:
            x[2] = 0
        return {"x": x}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        u, v = model(b["x"]).unbind(-1)
        return torch.hypot(u, v + (1e-4 if fixed else 0.0)).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "pytorch/pytorch#52248",
    expected=Expected(
        step=1, op="aten.div", node="SqrtBackward0", event="inf", proof=ONLY, **BACKWARD
    ),
    accepted=("SG401",),
)
def gradient_penalty_of_a_dead_critic(fixed: bool) -> Scene:
    """WGAN-GP: ReLU units are all dead, the input gradient is 0 and sqrt(sum of squares) has no
    slope there.
    """
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(2, 4), act=nn.ReLU(), fc2=nn.Linear(4, 1))

    def batch(step: int) -> Batch:
        return {"x": randn(3, 2, seed=step) - (1e3 if step == 1 else 0.0)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        x = b["x"].clone().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        norm = torch.sqrt(slope.pow(2).sum(-1) + (1e-12 if fixed else 0.0))
        return score.mean() * 1e-3 + (norm - 1).pow(2).mean()

    with torch.no_grad():
        model.fc1.weight.abs_()
        model.fc1.bias.fill_(5.0)

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


class Inverse(torch.autograd.Function):
    """A straight-through estimator whose backward was written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad / (x.abs() + ctx.eps), None


@incident(
    "pytorch/pytorch#52248",
    expected=Expected(
        step=1,
        module="binary",
        op="aten.div",
        node="InverseBackward",
        event="inf",
        sample=1,
        proof=ONLY,
        **BACKWARD,
    ),
    accepted=("SG401", "SG201"),
)
def custom_backward_divides_by_activation(fixed: bool) -> Scene:
    """A custom autograd Function divides by |x| in its backward, and a dead sample gives x = 0."""
    torch.manual_seed(0)
    eps = 1e-3 if fixed else 0.0
    model = chain(
        inp=nn.Linear(3, 4, bias=False),
        binary=Lambda(lambda x: Inverse.apply(x, eps)),
        out=nn.Linear(4, 1),
    )

    def batch(step: int) -> Batch:
        data = regression(step)
        if step == 1:
            data["x"][1] = 0
        return data

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-4))

"""Faults inside checkpointed blocks, shared modules, transformers and nested containers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import Lambda, chain, randn, sgd, tokens

LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


class Residual(nn.Module):
    """A pre-norm block whose norm divides by the root mean square without an epsilon."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.lin, self.eps = nn.Linear(4, 4, bias=False), eps

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())


class Checkpointed(nn.Module):
    def __init__(self, *, eps: float, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(eps=1e-6), Residual(eps=eps)])
        self.head, self.reentrant = nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def with_zero_row(step: int, sample: int, width: int = 4) -> Batch:
    x = randn(4, width, seed=step)
    if step == 1:
        x[sample] = 0
    return {"x": x.requires_grad_(), "y": LABELS}


@incident(
    "pytorch/pytorch#41527",
    expected=Expected(
        step=1, phase="forward", module="blocks.1", op="aten.div", event="nan", sample=2
    ),
    accepted=("SG201",),
)
def zero_token_in_a_checkpointed_block(fixed: bool) -> Scene:
    """Activation checkpointing runs the block twice; the division by zero is in its first run
    already.
    """
    torch.manual_seed(0)
    model = Checkpointed(eps=1e-6 if fixed else 0.0, reentrant=False)
    return Scene(
        model=model, batch=lambda step: with_zero_row(step, 2), loss=classify, optimizer=sgd(model)
    )


class RootBlock(nn.Module):
    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.lin, self.eps = nn.Linear(4, 4, bias=False), eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.lin(x).pow(2) + self.eps)


class CheckpointedRoot(nn.Module):
    def __init__(self, *, eps: float, reentrant: bool) -> None:
        super().__init__()
        self.inp, self.block, self.head = (
            nn.Linear(4, 4, bias=False),
            RootBlock(eps=eps),
            nn.Linear(4, 2),
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.inp(x), use_reentrant=self.reentrant))


ROOT = Expected(
    step=1,
    phase="backward",
    module="block",
    op="aten.div",
    node="SqrtBackward0",
    event="inf",
    sample=1,
    loss_finite=True,
)


@incident("pytorch/audio#993", expected=ROOT, accepted=("SG401",))
def singular_root_in_a_checkpointed_block(fixed: bool) -> Scene:
    """sqrt at 0 inside a checkpointed block: born in the backward, after the block ran again."""
    torch.manual_seed(0)
    model = CheckpointedRoot(eps=1e-8 if fixed else 0.0, reentrant=False)
    return Scene(
        model=model, batch=lambda step: with_zero_row(step, 1), loss=classify, optimizer=sgd(model)
    )


@incident("pytorch/audio#993", expected=ROOT, accepted=("SG401",))
def singular_root_in_a_reentrant_checkpoint(fixed: bool) -> Scene:
    """The same with the older reentrant checkpoint, whose backward runs a backward of its own."""
    torch.manual_seed(0)
    model = CheckpointedRoot(eps=1e-8 if fixed else 0.0, reentrant=True)
    return Scene(
        model=model, batch=lambda step: with_zero_row(step, 1), loss=classify, optimizer=sgd(model)
    )


class Siamese(nn.Module):
    """One encoder for both sides."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.encoder = chain(
            lin=nn.Linear(3, 4, bias=False),
            unit=Lambda(lambda x: x / (x.norm(dim=-1, keepdim=True) + eps)),
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.encoder(a) * self.encoder(b)).sum(-1)


@incident(
    "mihaidusmanu/d2-net#78",
    expected=Expected(
        step=1, phase="forward", module="encoder.unit", op="aten.div", event="nan", sample=3
    ),
    accepted=("SG201",),
)
def shared_encoder_second_call(fixed: bool) -> Scene:
    """The second of two inputs of a shared encoder is blank."""
    torch.manual_seed(0)
    model = Siamese(eps=1e-6 if fixed else 0.0)

    def batch(step: int) -> Batch:
        b = randn(4, 3, seed=step + 9)
        if step == 1:
            b[3] = 0
        return {"a": randn(4, 3, seed=step), "b": b, "y": torch.tensor([1.0, 0.0, 1.0, 0.0])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(b["a"], b["b"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Head(nn.Module):
    """Softmax with a learned temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature, self.out = nn.Parameter(torch.tensor(temperature)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) / self.temperature


class Transformer(nn.Module):
    """nn.TransformerEncoder under a padding mask, with a head of its own."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.emb = nn.Embedding(8, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = Head(temperature)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.emb(ids), src_key_padding_mask=ids.eq(0)))


@incident(
    "huggingface/transformers#9295",
    expected=Expected(step=0, phase="forward", module="head", op="aten.div", event="inf"),
    accepted=("SG201",),
)
def contrastive_temperature_of_zero(fixed: bool) -> Scene:
    """A temperature that was learned down to 0, behind a whole transformer encoder with padding."""
    torch.manual_seed(0)
    model = Transformer(0.07 if fixed else 0.0)

    def batch(step: int) -> Batch:
        ids = tokens(2, 5, seed=step, low=1)
        ids[1, 3:] = 0
        return {"ids": ids, "y": ids.roll(-1, 1).masked_fill(ids.eq(0), -100)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten())

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=1)


@incident(
    "pytorch/pytorch#41527",
    expected=Expected(
        step=1, phase="forward", module="norm", op="aten.native_group_norm", event="nan", sample=0
    ),
    accepted=("SG201",),
)
def group_norm_without_epsilon(fixed: bool) -> Scene:
    """GroupNorm(eps=0) on a black image behind a convolution without bias: the variance is 0."""
    torch.manual_seed(0)
    model = chain(
        conv=nn.Conv2d(1, 4, 3, bias=False),
        norm=nn.GroupNorm(2, 4, eps=1e-5 if fixed else 0.0),
        act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(4, 2),
    )

    def batch(step: int) -> Batch:
        x = randn(4, 1, 6, 6, seed=step)
        if step == 1:
            x[0] = 0
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))


class Sinkhorn(nn.Module):
    """Entropic transport in linear space: exp(-cost / eps) underflows to 0 rows."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, cost: Tensor) -> Tensor:
        plan = torch.exp(-cost / self.eps)
        for _ in range(3):
            plan = plan / plan.sum(-1, keepdim=True)
            plan = plan / plan.sum(-2, keepdim=True)
        return plan


class Matcher(nn.Module):
    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.project, self.transport = nn.Linear(3, 4), Sinkhorn(eps=eps)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        cost = torch.cdist(self.project(a), self.project(b))
        return (self.transport(cost) * cost).sum((-1, -2))


@incident(
    "deepmodeling/deepmd-kit#5519",
    expected=Expected(
        step=1, phase="forward", module="transport", op="aten.div", event="nan", sample=2
    ),
    accepted=("SG201",),
)
def sinkhorn_kernel_underflows(fixed: bool) -> Scene:
    """One pair of clouds is far apart: all of its kernel underflows, and the rows sum to 0."""
    torch.manual_seed(0)
    model = Matcher(eps=1e3 if fixed else 0.5)

    def batch(step: int) -> Batch:
        b = randn(3, 5, 3, seed=step + 7)
        if step == 1:
            b[2] += 500.0
        return {"a": randn(3, 5, 3, seed=step), "b": b}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["a"], b["b"]).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))


class Rotary(nn.Module):
    """Nested twice: decoder.layers.1.attention.scale holds the bad operation."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"q": nn.Linear(4, 4, bias=False), "scale": Lambda(_sinc if safe else _bare_sinc)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention["scale"](self.attention["q"](x))


def _sinc(x: Tensor) -> Tensor:
    return torch.sinc(x / math.pi)


def _bare_sinc(x: Tensor) -> Tensor:
    return torch.sin(x) / x


class Stack(nn.Module):
    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict(
            {"layers": nn.ModuleList([Rotary(safe=True), Rotary(safe=safe)])}
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.decoder["layers"]
        for layer in layers:
            x = layer(x)
        return self.head(x)


@incident(
    "pytorch/pytorch#98276",
    expected=Expected(
        step=1,
        phase="forward",
        module="decoder.layers.1.attention.scale",
        op="aten.div",
        event="nan",
        sample=1,
    ),
    accepted=("SG201",),
)
def sinc_by_hand_deep_inside(fixed: bool) -> Scene:
    """sin(x) / x at x = 0, four containers deep."""
    torch.manual_seed(0)
    model = Stack(safe=fixed)
    first = model.decoder["layers"][0].attention["scale"]
    first.formula = lambda x: (
        _sinc(x) - 1.0
    )  # so that a zero sample is still zero in the second layer

    def batch(step: int) -> Batch:
        return {k: v.detach() for k, v in with_zero_row(step, 1).items()}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))

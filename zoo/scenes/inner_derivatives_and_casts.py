"""Derivatives inside the loss, functions over modules, checkpoints under autocast, casts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import Attention, Lambda, chain, randn, regression, sgd, tokens

LABELS = torch.tensor([0, 1, 0, 1])


def classify(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


@incident(
    expected=Expected(step=1, phase="forward", module="unit", op="aten.div", event="nan", sample=2),
    accepted=("SG201",),
)
def unit_vector_under_vmap(fixed: bool) -> Scene:
    """A function for one sample, mapped over the batch; one sample is blank."""
    torch.manual_seed(0)
    floor = 1e-6 if fixed else 0.0
    unit = Lambda(vmap(lambda row: row / (row.norm() + floor)))
    model = chain(inp=nn.Linear(3, 4, bias=False), unit=unit, head=nn.Linear(4, 2))

    def batch(step: int) -> Batch:
        x = randn(4, 3, seed=step)
        if step == 1:
            x[2] = 0
        return {"x": x, "y": LABELS}

    return Scene(model=model, batch=batch, loss=classify, optimizer=sgd(model))


@incident(
    expected=Expected(step=1, phase="loss", op="aten.div", event="nan"),
    accepted=("SG201",),
)
def inner_step_of_a_solved_task(fixed: bool) -> Scene:
    """Meta-learning takes a normalised inner step; a task that is solved already has gradient 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)

    def batch(step: int) -> Batch:
        b = regression(step)
        if step == 1:
            b["x"] = b["x"] * 0
            b["y"] = b["y"] * 0
        return b | {"query": randn(4, 3, seed=9), "answer": randn(4, 1, seed=10)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        inner = F.mse_loss(model(b["x"]), b["y"])
        (slope,) = torch.autograd.grad(inner, [model.weight], create_graph=True)
        fast = model.weight - 0.1 * slope / (slope.detach().norm() + (1e-8 if fixed else 0.0))
        return F.mse_loss(functional_call(model, {"weight": fast}, (b["query"],)), b["answer"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


class Half(nn.Module):
    """Two wide layers, recomputed in the backward pass."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 32, bias=False), nn.Linear(32, 4, bias=False)
        nn.init.constant_(self.up.weight, size)
        nn.init.constant_(self.down.weight, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.blocks = nn.ModuleDict({"first": Half(0.05), "second": Half(24.0)})
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inp(x)) + 2.0
        for block in self.blocks.values():
            x = self.norm(checkpoint(block, x, use_reentrant=False)) + 2.0
        return self.head(x)


@incident(
    "huggingface/transformers#12225",
    expected=Expected(
        step=0, phase="forward", module="blocks.second.down", op="aten.mm", event="inf"
    ),
    accepted=("SG301",),
)
def half_overflow_in_a_checkpointed_block(fixed: bool) -> Scene:
    """Autocast and activation checkpointing together: the block overflows when it first runs."""
    torch.manual_seed(0)
    model = Checkpointed()
    return Scene(
        model=model,
        batch=lambda step: {"x": randn(4, 3, seed=step), "y": LABELS},
        loss=lambda model, b: F.cross_entropy(model(b["x"]).float(), b["y"]),
        optimizer=sgd(model, 1e-5),
        steps=1,
        autocast=torch.bfloat16 if fixed else torch.float16,
    )


class Rotary(nn.Module):
    """Rotary angles computed in the dtype of the model."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        position = position.to(torch.float32 if self.wide else x.dtype)
        angle = position[:, None] * torch.tensor([1.0, 0.01], dtype=position.dtype)
        return x * torch.cat([angle.cos(), angle.sin()], -1).to(x.dtype)


class Positions(nn.Module):
    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.inp, self.rope, self.head = nn.Linear(3, 4), Rotary(wide=wide), nn.Linear(4, 2)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return self.head(self.rope(self.inp(x), position))


@incident(
    "ROCm/AMDMIGraphX#1494",
    expected=Expected(
        step=1, phase="forward", module="rope", op="aten._to_copy", event="inf", sample=3
    ),
    accepted=("SG301", "SG103"),
)
def rotary_position_beyond_half(fixed: bool) -> Scene:
    """Token 70000 of a long document: its position is infinite in float16, and so cos is NaN."""
    torch.manual_seed(0)
    model = Positions(wide=fixed).half()

    def batch(step: int) -> Batch:
        position = torch.tensor([5, 100, 2000, 70000 if step == 1 else 9000])
        return {"x": randn(4, 3, seed=step).half(), "position": position, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["position"]).float(), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-3))


@incident(
    "ROCm/AMDMIGraphX#850",
    expected=Expected(step=1, phase="forward", module="pool", op="aten.sum", event="inf", sample=1),
    accepted=("SG301",),
)
def sum_over_a_long_clip_in_half(fixed: bool) -> Scene:
    """Pooling sums before it divides: 600 frames of 200 exceed 65504."""
    torch.manual_seed(0)
    pool = Lambda((lambda x: x.mean(1)) if fixed else (lambda x: x.sum(1) / x.shape[1]))
    model = chain(pool=pool, head=nn.Linear(3, 2)).half()

    def batch(step: int) -> Batch:
        x = randn(4, 600, 3, seed=step).half()
        if step == 1:
            x[1] = 200.0
        return {"x": x, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]).float(), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


class Tied(nn.Module):
    """One matrix embeds the words and scores them."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mix = nn.Embedding(6, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 6, bias=False)
        self.out.weight = self.emb.weight
        with torch.no_grad():
            self.emb.weight[5] = 120.0
            self.mix.weight.copy_(torch.eye(8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mix(self.emb(ids)))


@incident(
    expected=Expected(step=1, phase="forward", module="out", op="aten.mm", event="inf", sample=2),
    accepted=("SG301",),
)
def tied_weight_meets_itself_in_half(fixed: bool) -> Scene:
    """A word with a large embedding is scored against itself: 8 * 120^2 exceeds float16."""
    torch.manual_seed(0)
    model = Tied()

    def batch(step: int) -> Batch:
        ids = tokens(4, seed=step, high=5)
        if step == 1:
            ids[2] = 5
        return {"ids": ids, "y": torch.tensor([0, 1, 2, 3])}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["ids"]).float(), b["y"]),
        optimizer=sgd(model, 1e-9),
        autocast=torch.bfloat16 if fixed else torch.float16,
    )


class MaskedAttention(nn.Module):
    """The mask is filled with -1e9 in float32 and then cast to the dtype of the scores."""

    def __init__(self, *, depth: float) -> None:
        super().__init__()
        self.inp, self.attn, self.head, self.depth = (
            nn.Linear(3, 4),
            Attention(4),
            nn.Linear(4, 2),
            depth,
        )

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        mask = (pad.float() * self.depth).to(x.dtype)[:, None, :]
        return self.head(self.attn(self.inp(x), mask).mean(1))


@incident(
    "huggingface/transformers#17306",
    expected=Expected(
        step=1, phase="forward", module="", op="aten._to_copy", event="inf", sample=0
    ),
    accepted=("SG301", "SG204"),
)
def large_negative_mask_cast_to_half(fixed: bool) -> Scene:
    """-1e9 is -inf in float16; a sample that is all padding has nothing left to attend to."""
    torch.manual_seed(0)
    model = MaskedAttention(depth=-1e4 if fixed else -1e9).half()

    def batch(step: int) -> Batch:
        pad = torch.zeros(4, 3, dtype=torch.bool)
        if step == 1:
            pad[0] = True
        return {"x": randn(4, 3, 3, seed=step).half(), "pad": pad, "y": LABELS}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["pad"]).float(), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-4))


class LogWithFloor(torch.autograd.Function):
    """A logarithm with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.floor = floor
        return torch.log(x + floor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad / (x + ctx.floor), None


@incident(
    expected=Expected(step=1, phase="forward", module="log", op="aten.log", event="inf", sample=3),
    accepted=("SG202",),
)
def custom_function_takes_the_log_of_zero(fixed: bool) -> Scene:
    """The logarithm hides in an autograd.Function; a dead unit gives it 0."""
    torch.manual_seed(0)
    floor = 1e-6 if fixed else 0.0
    model = chain(
        inp=nn.Linear(3, 4, bias=False),
        act=Lambda(torch.abs),
        log=Lambda(lambda x: LogWithFloor.apply(x, floor)),
    )

    def batch(step: int) -> Batch:
        b = regression(step, outputs=4)
        if step == 1:
            b["x"][3] = 0
        return b

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-4))


class Heads(nn.Module):
    """A shared trunk with several heads in a ModuleDict, each with its own target."""

    def __init__(self, *, floor: float) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4, bias=False)
        self.heads = nn.ModuleDict(
            {
                "normal": nn.Linear(4, 3),
                "depth": chain(
                    disparity=nn.Linear(4, 1, bias=False),
                    invert=Lambda(lambda d: 1 / (d.abs() + floor)),
                ),
            }
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared = self.trunk(x).relu()
        return {name: head(shared) for name, head in self.heads.items()}


@incident(
    expected=Expected(
        step=1,
        phase="forward",
        module="heads.depth.invert",
        op="aten.reciprocal",
        event="inf",
        sample=2,
        micro=1,
    ),
    accepted=("SG201",),
)
def depth_head_inverts_a_dead_disparity(fixed: bool) -> Scene:
    """One of two heads, second of three micro-batches: the disparity of a blank image is 0."""
    torch.manual_seed(0)
    model = Heads(floor=1e-3 if fixed else 0.0)

    def batch(step: int) -> list[Batch]:
        parts = [{"x": randn(4, 3, seed=3 * step + k), "y": randn(4, 3, seed=k)} for k in range(3)]
        for part in parts:
            part["x"] = part["x"].abs()
        if step == 1:
            parts[1]["x"][2] = 0
        return parts

    def loss(model: nn.Module, b: Batch) -> Tensor:
        out = model(b["x"])
        return F.mse_loss(out["normal"], b["y"]) + 1e-6 * out["depth"].mean()

    with torch.no_grad():
        model.trunk.weight.abs_()
        model.heads["depth"].disparity.weight.abs_()
    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model, 1e-6))

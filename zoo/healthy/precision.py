"""Half precision with and without a scaler, closures, several optimizers on one model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from zoo.healthy.data import Clouds, classified, mlp, regression, squared
from zoo.healthy.training import Learner, Training, Way, family, register, single

GROUP = "precision and optimizers"


def half(fused: bool, handed_over: bool, unscales: bool, seed: int) -> Training:
    """fp16 with a scale that grows every 20 steps until it overflows, again and again: calibration,
    no illness.
    """
    clouds, model = Clouds(seed), mlp()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            said = model(batch[0])
        return F.cross_entropy(said.float(), batch[1])

    learner = Learner(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused),
        loss=loss,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=20),
        scaler_handed_over=handed_over,
        unscales=unscales,
        clip=1.0 if unscales else None,
    )
    return single(learner, lambda step: clouds.batch())


HALVES: dict[str, tuple[bool, bool, bool, Way]] = {
    "fp16_scaler": (False, True, True, "step"),
    "fp16_scaler_clipped": (False, True, True, "watch"),
    "fp16_fused": (True, True, False, "watch"),
    "fp16_fused_in_step": (True, True, True, "step"),
    "fp16_fused_scaler_not_handed_over": (True, False, False, "watch"),
    "fp16_scaler_not_handed_over": (False, False, False, "watch"),
}
for name, (*how, way) in HALVES.items():
    register(name, GROUP, way, partial(half, *how))


@family(GROUP, "watch")
def bf16_autocast(seed: int) -> Training:
    clouds, model = Clouds(seed), mlp()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    learner = Learner(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss
    )
    return single(learner, lambda step: clouds.batch())


@family(GROUP, "step")
def bf16_weights(seed: int) -> Training:
    """Weights and moments in bf16: the loss moves in coarse steps."""
    clouds, model = Clouds(seed), mlp().bfloat16()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()), batch[1])

    learner = Learner(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss
    )
    return single(learner, lambda step: clouds.batch())


@family(GROUP, "step")
def fused_adam(seed: int) -> Training:
    clouds, model = Clouds(seed), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return single(
        Learner(model=model, optimizer=optimizer, loss=classified(model)),
        lambda step: clouds.batch(),
    )


@family(GROUP, "watch")
def lbfgs(seed: int) -> Training:
    """A few evaluations a step, as many as the optimizer likes."""
    model, drawn = mlp(hidden=4, outputs=1), regression(seed)
    whole = drawn(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    return single(
        Learner(model=model, optimizer=optimizer, loss=squared(model)), lambda step: whole
    )


class Orthogonal(Optimizer):
    """Muon in small: momentum made orthogonal by Newton and Schulz; a missing gradient counts as
    zeros.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
                state = self.state[weight]
                moved = (
                    state.setdefault("momentum", torch.zeros_like(weight)).mul_(0.95).add_(gradient)
                )
                weight.add_(_orthogonal(moved), alpha=-group["lr"])


def _orthogonal(matrix: Tensor) -> Tensor:
    found = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        square = found @ found.T
        found = 1.5 * found - 0.5 * square @ found
    return found


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@family(GROUP, "watch")
def two_optimizers_on_one_model(seed: int) -> Training:
    """Muon for the matrices, AdamW for the rest: one backward, two updates."""
    clouds, model = Clouds(seed), Halves()
    matrices = [w for w in model.parameters() if w.dim() == 2]
    others = [w for w in model.parameters() if w.dim() != 2]
    learner = Learner(
        model=model,
        optimizer=Orthogonal(matrices, lr=0.02),
        further=(torch.optim.AdamW(others, lr=1e-2),),
        loss=classified(model),
    )
    return single(learner, lambda step: clouds.batch())

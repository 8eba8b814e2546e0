"""Healthy runs that look suspicious: none of them may raise an alarm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Scene, control
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, NAN, Attention, Lambda, randn, regression, sgd


class CausalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.attn, self.out = nn.Linear(3, 4), Attention(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(self.inp(x), torch.full((4, 4), -INF).triu(1)).mean(1))


@control("pytorch/pytorch#131060")
def ok_causal_mask_neginf(fixed: bool) -> Scene:
    """-inf in every causal mask, no row fully masked."""
    torch.manual_seed(0)
    model = CausalNet()

    def batch(step: int) -> Batch:
        return {"x": randn(2, 4, 3, seed=step), "y": torch.tensor([0, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=3)


@control("LEEYOONHYUNG/BVAE-TTS#3", transient_grads=True)
def ok_gradscaler_warmup_overflow(fixed: bool) -> Scene:
    """GradScaler begins at 2**22 with fp16 autocast: the first steps overflow and are skipped, then
    all is well.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def batch(step: int) -> Batch:
        return {"x": randn(8, 8, seed=step) * 4, "y": randn(8, 1, seed=step + 1) * 4}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]).float(), b["y"])

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd(model, 1e-3),
        steps=12,
        autocast=torch.float16,
        scaler={"init_scale": 2.0**22},
    )


@control("pytorch/pytorch#52248")
def ok_double_where(fixed: bool) -> Scene:
    """A root made safe by two `where`s."""
    torch.manual_seed(0)

    def root(x: Tensor) -> Tensor:
        return torch.where(
            x > 0, torch.sqrt(torch.where(x > 0, x, torch.ones_like(x))), torch.zeros_like(x)
        )

    model = nn.Sequential(nn.Linear(3, 6), Lambda(root), nn.Linear(6, 1))
    return Scene(model=model, batch=regression, loss=mse, optimizer=sgd(model))


@control("unit8co/darts#1739")
def ok_nan_targets_masked_out(fixed: bool) -> Scene:
    """Missing targets are NaN and are taken out by indexing before the loss."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        y = randn(4, 2, seed=step + 1)
        y[1, 0] = NAN
        return {"x": randn(4, 3, seed=step), "y": y}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        known = ~b["y"].isnan()
        return F.mse_loss(model(b["x"])[known], b["y"][known])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@control("karpathy/nanoGPT#468")
def ok_loss_spike_recovers(fixed: bool) -> Scene:
    """One batch with a 30 times larger loss under clipping: training goes on improving."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def batch(step: int) -> Batch:
        x, size = randn(16, 4, seed=step), 6 if step == 6 else 1
        return {"x": x * size, "y": (x @ randn(4, 1, seed=9)) * size}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 0.02), steps=12, clip=1.0)

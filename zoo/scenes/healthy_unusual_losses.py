"""Healthy runs whose loss jumps, is huge, negative or zero, or follows a schedule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Scene, control
from zoo.scenes.gradients import mse
from zoo.scenes.parts import chain, generator, randn, sgd
from zoo.scenes.rates import student, teacher_batch


@control("unit8co/darts#1739")
def ok_huge_finite_losses(fixed: bool) -> Scene:
    """Targets in base units: the loss is 1e12 and falls."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)

    def batch(step: int) -> Batch:
        data = teacher_batch(step)
        return {"x": data["x"], "y": data["y"] * 1e6}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 0.05), steps=20)


@control("lucidrains/stylegan2-pytorch#100")
def ok_adversarial_losses_jump(fixed: bool) -> Scene:
    """A critic against a moving generator: the loss changes sign and size from step to step."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(4, 8), act=nn.LeakyReLU(0.2), fc2=nn.Linear(8, 1))

    def batch(step: int) -> Batch:
        size = 1.0 + 6.0 * float(torch.rand((), generator=generator(1000 + step)))
        return {
            "real": randn(16, 4, seed=step) * size,
            "fake": randn(16, 4, seed=step + 500) * (8.0 - size),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return model(b["fake"]).mean() - model(b["real"]).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.0, 0.9))
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=60)


@control("hpcaitech/ColossalAI#5370")
def ok_hinge_is_satisfied(fixed: bool) -> Scene:
    """A margin loss reaches exactly 0 with gradient 0 and stays there: learned, not broken."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(3.0)

    def batch(step: int) -> Batch:
        side = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
        return {"x": side * (1 + randn(4, 2, seed=step).abs()), "side": side}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.relu(1 - b["side"] * model(b["x"])).mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model), steps=10)


@control("karpathy/nanoGPT#468")
def ok_hard_batches_now_and_then(fixed: bool) -> Scene:
    """Every seventh batch is from a harder source, with a loss fifty times as large."""
    model = student()

    def batch(step: int) -> Batch:
        data = teacher_batch(step)
        return {"x": data["x"], "y": data["y"] * 7 if step % 7 == 6 else data["y"]}

    return Scene(
        model=model, batch=batch, loss=mse, optimizer=sgd(model, 0.005), steps=40, clip=1.0
    )


@control("facebookresearch/svoice#22")
def ok_negative_log_likelihood_below_zero(fixed: bool) -> Scene:
    """A density above 1 makes the loss negative, and it goes on falling."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def batch(step: int) -> Batch:
        x = randn(16, 3, seed=step)
        return {"x": x, "y": x.sum(-1, keepdim=True) * 0.1}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        mean, log_scale = model(b["x"]).chunk(2, -1)
        log_scale = log_scale.clamp(-4, 4)
        return (0.5 * ((b["y"] - mean) * torch.exp(-log_scale)).pow(2) + log_scale).mean()

    return Scene(
        model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.01), steps=50, clip=1.0
    )


@control("karpathy/nanoGPT#578")
def ok_warmup_then_warm_restarts(fixed: bool) -> Scene:
    """Linear warm-up from 0 and a cosine that restarts at its peak every twelve steps."""
    model = student()
    optimizer = sgd(model, 0.02)

    def before(step: int) -> None:
        phase = (step - 5) % 12 / 12
        rate = 0.02 * step / 5 if step < 5 else 0.01 * (1 + math.cos(math.pi * phase))
        optimizer.param_groups[0]["lr"] = rate

    return Scene(
        model=model,
        batch=teacher_batch,
        loss=mse,
        optimizer=optimizer,
        steps=40,
        before_step=before,
    )


@control("brjathu/iTAML#10")
def ok_a_new_task_begins(fixed: bool) -> Scene:
    """Continual learning: at step 20 the targets change; the loss jumps and is learned down."""
    model = student()

    def batch(step: int) -> Batch:
        x = randn(16, 8, seed=step)
        return {"x": x, "y": x @ randn(8, 1, seed=99 if step < 20 else 7) * (1 if step < 20 else 4)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 0.02), steps=45)


@control("cvignac/SMP#3")
def ok_heavy_dropout(fixed: bool) -> Scene:
    """Dropout of 0.9 and tiny batches: the loss is mostly noise."""
    torch.manual_seed(0)
    model = chain(fc1=nn.Linear(8, 64), act=nn.ReLU(), drop=nn.Dropout(0.9), fc2=nn.Linear(64, 1))

    def batch(step: int) -> Batch:
        return {key: value[:2] for key, value in teacher_batch(step).items()}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-3), steps=60)


@control("LEEYOONHYUNG/BVAE-TTS#3", transient_grads=True)
def ok_scaler_grows_until_it_overflows(fixed: bool) -> Scene:
    """GradScaler doubles its scale every few steps and now and then goes too far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.mse_loss(model(b["x"]).float(), b["y"])

    return Scene(
        model=model,
        batch=teacher_batch,
        loss=loss,
        optimizer=sgd(model, 1e-3),
        steps=30,
        autocast=torch.float16,
        scaler={"init_scale": 2.0**12, "growth_interval": 3},
    )


@control("unit8co/darts#1977")
def ok_curriculum_gets_harder(fixed: bool) -> Scene:
    """Sequences grow longer and the loss rises slowly with them: the data did it."""
    model = student()

    def batch(step: int) -> Batch:
        data = teacher_batch(step)
        return {"x": data["x"], "y": data["y"] + 0.06 * step * randn(16, 1, seed=step + 300)}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 0.01), steps=80)


@control("huggingface/peft#2049")
def ok_frozen_and_unused_parameters(fixed: bool) -> Scene:
    """Half of the model is frozen, one layer is never used, and the adapter starts at zero."""
    torch.manual_seed(0)

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = (
                nn.Linear(8, 1),
                nn.Linear(8, 2, bias=False),
                nn.Linear(2, 1, bias=False),
            )
            self.unused = nn.Linear(4, 4)
            self.base.requires_grad_(False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = Adapter()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Scene(model=model, batch=teacher_batch, loss=mse, optimizer=optimizer, steps=20)


@control("karpathy/nanoGPT#468")
def ok_outlier_batch_without_clipping(fixed: bool) -> Scene:
    """One batch with labels off by a factor of 30 pushes the weights a little; they come back by
    themselves.
    """
    model = student()

    def batch(step: int) -> Batch:
        data = teacher_batch(step)
        return {"x": data["x"], "y": data["y"] * 30 if step == 25 else data["y"]}

    return Scene(model=model, batch=batch, loss=mse, optimizer=sgd(model, 1e-3), steps=45)

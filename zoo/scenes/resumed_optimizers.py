"""Custom optimizers, schedules past their end, and state that a checkpoint changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.gradients import mse
from zoo.scenes.parts import chain, randn, sgd, tokens


class Keypoints(nn.Module):
    """A frozen backbone under a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 6)
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


@incident(
    expected=Expected(
        step=4, phase="optimizer", event="spike", loss_finite=True, grads_finite=True
    ),
    accepted=("SG504", "SG505"),
)
def unfrozen_backbone_gets_head_lr(fixed: bool) -> Scene:
    """At step 4 the backbone is unfrozen as a new parameter group whose rate is far too high."""
    torch.manual_seed(0)
    model = Keypoints()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.02, momentum=0.9)
    truth = randn(10, 6, seed=77)

    def batch(step: int) -> Batch:
        x = randn(12, 10, seed=step)
        return {"x": x, "y": x @ truth}

    def before(step: int) -> None:
        if step == 4:
            model.backbone.requires_grad_(True)
            rate = 0.002 if fixed else 5.0
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": rate})

    return Scene(
        model=model, batch=batch, loss=mse, optimizer=optimizer, steps=12, before_step=before
    )


class RowNormalised(torch.optim.Optimizer):
    """Momentum, rescaled row by row and brought back to the norm it had."""

    def __init__(self, params: Iterable[Tensor], *, floor: float) -> None:
        super().__init__(params, {"lr": 0.02, "beta": 0.9, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self._direction(p, group["beta"], group["floor"]), alpha=-group["lr"])

    def _direction(self, p: Tensor, beta: float, floor: float) -> Tensor:
        state = self.state[p]
        if not state:
            state["mom"] = torch.zeros_like(p)
            state["row"] = torch.zeros(p.shape[0], *([1] * (p.dim() - 1)))
        momentum: Tensor = state["mom"].mul_(beta).add_(p.grad)
        if p.dim() != 2:
            return momentum
        state["row"].mul_(0.95).add_(momentum.pow(2).mean(1, keepdim=True), alpha=0.05)
        rescaled: Tensor = momentum / (state["row"].sqrt() + 1e-8)
        ratio: Tensor = momentum.norm() / rescaled.norm().clamp_min(floor)
        return rescaled * ratio


class PatchClassifier(nn.Module):
    """The last layer starts at zero, so the layers below get gradient 0 in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.gelu(self.norm(self.embed(x))).mean(1))
        return out


@incident(
    "microsoft/dion#24",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.div",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "embed.weight"},
    ),
    accepted=("SG201",),
)
def normuon_zero_gradient_matrix(fixed: bool) -> Scene:
    """The update of a layer without gradient is 0, and it is scaled by its old norm over its new
    one: 0 / 0.
    """
    torch.manual_seed(0)
    model = PatchClassifier()
    return Scene(
        model=model,
        batch=lambda step: {"x": randn(4, 5, 12, seed=step), "y": torch.tensor([0, 1, 2, 1])},
        loss=lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
        optimizer=RowNormalised(model.parameters(), floor=1e-8 if fixed else 0.0),
        steps=3,
    )


class PixelRegressor(nn.Module):
    """Boxes in pixels, so that gradients are large."""

    def __init__(self) -> None:
        super().__init__()
        self.neck, self.box = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.box(self.neck(x).relu()) * 100
        return out


@incident(
    "ultralytics/ultralytics#17282",
    expected=Expected(
        step=3,
        phase="optimizer",
        op="aten.mul_",
        event="opt:momentum_buffer",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "box.bias"},
    ),
    accepted=("SG503",),
)
def momentum_saved_as_half(fixed: bool) -> Scene:
    """The checkpoint that is resumed at step 3 was saved in float16: momentum above 65504 comes
    back infinite.
    """
    torch.manual_seed(0)
    model = PixelRegressor()
    optimizer = sgd(model, 1e-8, momentum=0.9)

    def before(step: int) -> None:
        if step == 3 and not fixed:
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                state["momentum_buffer"] = state["momentum_buffer"].half().float()
            optimizer.load_state_dict(saved)

    return Scene(
        model=model,
        batch=lambda step: {
            "x": randn(6, 5, seed=step),
            "y": 320 + 60 * randn(6, 4, seed=step + 1),
        },
        loss=lambda model, b: (model(b["x"]) - b["y"]).pow(2).sum(),
        optimizer=optimizer,
        steps=5,
        before_step=before,
    )


class LeftPreconditioned(torch.optim.Optimizer):
    """One side of Shampoo; the preconditioner is used from the third step on."""

    def __init__(self, params: Iterable[Tensor], *, least: float) -> None:
        super().__init__(params, {"lr": 1e-2, "least": least})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                if not state:
                    state["n"], state["left"] = 0, torch.zeros(len(p), len(p))
                state["n"] += 1
                state["left"] += grad @ grad.T
                if state["n"] > 2:
                    values, vectors = torch.linalg.eigh(state["left"])
                    if group["least"]:
                        values = values.clamp_min(group["least"] * values.amax())
                    grad = vectors @ (values.pow(-0.25)[:, None] * (vectors.T @ grad))
                p.sub_(group["lr"] * grad)


@incident(
    "NVIDIA-NeMo/Emerging-Optimizers#267",
    expected=Expected(
        step=2,
        phase="optimizer",
        op="aten.pow",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "weight"},
    ),
    accepted=("SG207",),
)
def shampoo_root_of_a_rounded_eigenvalue(fixed: bool) -> Scene:
    """The statistics have rank 3 of 8; eigh rounds a zero eigenvalue below 0, and its inverse root
    is NaN.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 8, bias=False)
    return Scene(
        model=model,
        batch=lambda step: {"x": randn(1, 6, seed=step), "y": randn(1, 8, seed=step + 1)},
        loss=mse,
        optimizer=LeftPreconditioned(model.parameters(), least=1e-4 if fixed else 0.0),
        steps=3,
    )


class Factored(torch.optim.Optimizer):
    """Adafactor's second moment; `wide` keeps it in float32, not in the gradient's dtype."""

    def __init__(self, params: Iterable[Tensor], *, wide: bool) -> None:
        super().__init__(params, {"lr": 1e-2, "wide": wide})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self._update(p, p.grad.float() if group["wide"] else p.grad)
                    p.sub_((group["lr"] * update).to(p.dtype))

    def _update(self, p: Tensor, grad: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["t"], state["row"], state["col"] = (
                0,
                torch.zeros_like(grad[:, 0]),
                torch.zeros_like(grad[0]),
            )
        state["t"] += 1
        keep = 1 - state["t"] ** -0.8
        square = grad * grad + 1e-30
        state["row"].mul_(keep).add_(square.mean(1), alpha=1 - keep)
        state["col"].mul_(keep).add_(square.mean(0), alpha=1 - keep)
        row: Tensor = (state["row"] / state["row"].mean()).rsqrt()
        column: Tensor = state["col"].rsqrt()
        return grad * row[:, None] * column[None]


class HalfAdapter(nn.Module):
    """A frozen layer with a low-rank update whose second factor starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5, bias=False)
        self.base.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6) * 0.5), nn.Parameter(torch.zeros(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)
        return out


@incident(
    "microsoft/LLM2CLIP#64",
    "google-deepmind/optax#1789",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.div",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "proj.a"},
    ),
    accepted=("SG502",),
)
def adafactor_on_fp16_lora(fixed: bool) -> Scene:
    """The first gradient of one factor is 0, and the 1e-30 that should keep its moments apart from
    0 is 0 in half.
    """
    torch.manual_seed(0)
    model = chain(proj=HalfAdapter()).half()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Scene(
        model=model,
        batch=lambda step: {
            "x": randn(8, 6, seed=step, dtype=torch.float16),
            "y": tokens(8, seed=step, high=5),
        },
        loss=lambda model, b: F.cross_entropy(model(b["x"]).float(), b["y"]),
        optimizer=Factored(trained, wide=fixed),
        steps=3,
    )


@incident(
    "VainF/DeepLabV3Plus-Pytorch#59",
    "FengheTan9/Multi-Level-Global-Context-Cross-Consistency#2",
    "Jittor/jittor#231",
    expected=Expected(
        step=5,
        phase="optimizer",
        op="aten.add_",
        event="seen",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "head.weight"},
    ),
    accepted=("SG504",),
)
def poly_schedule_past_its_end(fixed: bool) -> Scene:
    """The rate is a power of what is left of the run; training goes on, and the power of a negative
    rest is NaN.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(10, 6), act=nn.Tanh(), head=nn.Linear(6, 10))
    optimizer = sgd(model, 0.05, momentum=0.9)

    def before(step: int) -> None:
        rest = torch.tensor(1 - step / 4)
        optimizer.param_groups[0]["lr"] = 0.05 * float(
            (rest.clamp_min(0.0) if fixed else rest) ** 0.9
        )

    return Scene(
        model=model,
        batch=lambda step: {
            "ids": tokens(4, 4, seed=step, high=10),
            "y": tokens(4, 4, seed=step + 3, high=10),
        },
        loss=lambda model, b: F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten()),
        optimizer=optimizer,
        steps=7,
        before_step=before,
    )


@incident(
    "ultralytics/ultralytics#24085",
    "ultralytics/ultralytics#17282",
    expected=Expected(
        step=8, phase="optimizer", event="spike", loss_finite=True, grads_finite=True
    ),
    accepted=("SG503", "SG302"),
)
def second_moment_saved_in_fp16(fixed: bool) -> Scene:
    """Squares below 3e-8 became 0 in a float16 checkpoint, their means did not: unused rows move by
    lr * m / eps.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(24, 4), head=nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    truth = 0.3 * randn(24, 1, seed=77)

    def batch(step: int) -> Batch:
        ids = tokens(16, seed=step, high=24)
        return {"ids": ids, "y": truth[ids]}

    def before(step: int) -> None:
        if step == 8 and not fixed:
            for state in optimizer.state.values():
                for slot in ("exp_avg", "exp_avg_sq"):
                    state[slot].copy_(state[slot].half())

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: 0.003 * F.mse_loss(model(b["ids"]), b["y"]),
        optimizer=optimizer,
        steps=13,
        before_step=before,
    )

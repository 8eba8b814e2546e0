"""Custom updates that meet a zero, and moments that a checkpoint brings back as NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import NAN, randn, tokens


class Smoothed(torch.optim.Optimizer):
    """The memory of squares depends on how straight the path of a parameter was; `least` guards
    that division.
    """

    def __init__(self, params: Iterable[Tensor], *, least: float) -> None:
        super().__init__(params, {"lr": 1e-2, "least": least})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    keep = self._straightness(p, group["least"]) * 0.49 + 0.01
                    squares = (
                        self.state[p]["squares"]
                        .mul_(1 - keep * keep)
                        .add_(keep * keep * p.grad * p.grad)
                    )
                    p.sub_(group["lr"] * p.grad / (squares.sqrt() + 1e-6))

    def _straightness(self, p: Tensor, least: float) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(
                {slot: torch.zeros_like(p) for slot in ("before", "signed", "length", "squares")}
            )
        move = p - state["before"]
        state["before"].copy_(p)
        state["signed"].add_(move)
        state["length"].add_(move.abs())
        length: Tensor = state["length"].sum()
        straightness: Tensor = (
            state["signed"].sum().abs_().div_(length + least if least else length)
        )
        return straightness


class Adapter(nn.Module):
    """A frozen layer and a product of rank 2 that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.A, self.B = nn.Parameter(randn(2, 8, seed=1)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.base(x)
        return frozen + F.linear(F.linear(x, self.A), self.B)


class AdaptedClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up, self.head = (
            nn.Embedding(12, 8).requires_grad_(False),
            Adapter(),
            nn.Linear(8, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.up(self.emb(ids))).mean(1))
        return scores


@incident(
    "kozistr/pytorch_optimizer#522",
    expected=Expected(
        step=0,
        phase="optimizer",
        op="aten.div_",
        event="nan",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "up.B"},
    ),
    accepted=("SG201", "SG502"),
)
def lora_b_zero_init_adasmooth(fixed: bool) -> Scene:
    """AdaSmooth divides where a parameter has got by how far it went; an adapter that starts at 0
    went nowhere.
    """
    torch.manual_seed(0)
    model = AdaptedClassifier()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Scene(
        model=model,
        batch=lambda step: {
            "ids": tokens(4, 5, seed=step, high=12),
            "y": torch.tensor([0, 1, 2, 0]),
        },
        loss=lambda model, b: F.cross_entropy(model(b["ids"]), b["y"]),
        optimizer=Smoothed(trained, least=1e-6 if fixed else 0.0),
        steps=3,
    )


class LateEpsilon(torch.optim.Optimizer):
    """Adam with decoupled decay, whose epsilon comes after the inverse root, or `inside` it."""

    def __init__(self, params: Iterable[Tensor], *, inside: bool) -> None:
        settings = {
            "lr": 1e-3,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "inside": inside,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean, square = self._moments(p, *group["betas"])
                    eps: float = group["eps"]
                    inverse = (
                        (square + eps**2).rsqrt() if group["inside"] else square.rsqrt().add_(eps)
                    )
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(mean * inverse * group["lr"])

    def _moments(self, p: Tensor, short: float, long: float) -> tuple[Tensor, Tensor]:
        """Both moments, corrected for their start at 0."""
        state, grad = self.state[p], p.grad
        if not state:
            state["step"], state["exp_avg"], state["exp_avg_sq"] = (
                0,
                torch.zeros_like(p),
                torch.zeros_like(p),
            )
        state["step"] += 1
        state["exp_avg"].mul_(short).add_(grad, alpha=1 - short)
        state["exp_avg_sq"].mul_(long).addcmul_(grad, grad, value=1 - long)
        count: int = state["step"]
        return state["exp_avg"] / (1 - short**count), state["exp_avg_sq"] / (1 - long**count)


class SemiSupervised(nn.Module):
    """A classifier, and a second head that takes part only when asked."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(5, 12)
        self.body, self.label, self.extra = (
            nn.Sequential(first, nn.ReLU()),
            nn.Linear(12, 3),
            nn.Linear(12, 4),
        )
        nn.init.ones_(first.bias)

    def forward(self, x: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None]:
        hidden = self.body(x)
        return self.label(hidden), self.extra(hidden) if both else None


@incident(
    "kozistr/pytorch_optimizer#480",
    "lessw2020/FAdam_PyTorch#1",
    expected=Expected(
        step=2,
        phase="optimizer",
        op="aten.rsqrt",
        event="inf",
        loss_finite=True,
        grads_finite=True,
        proof={"param": "extra.weight"},
    ),
    accepted=("SG201", "SG502"),
)
def adamp_eps_after_rsqrt(fixed: bool) -> Scene:
    """A second loss is ramped up from 0: its head has gradients of exactly 0, and a root of 0 has
    no inverse.
    """
    torch.manual_seed(0)
    model = SemiSupervised()
    now = {"step": 0}

    def batch(step: int) -> Batch:
        return {
            "x": randn(6, 5, seed=step),
            "y": torch.tensor([0, 1, 2, 0, 1, 2]),
            "extra": randn(6, 4, seed=step + 3),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        label, extra = model(b["x"], both=now["step"] >= 2)
        total = F.cross_entropy(label, b["y"])
        return (
            total
            if extra is None
            else total + (now["step"] - 2) / 10 * F.mse_loss(extra, b["extra"])
        )

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=LateEpsilon(model.parameters(), inside=fixed),
        steps=4,
        before_step=lambda step: now.update(step=step),
    )


class WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mix, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(F.gelu(self.mix(self.emb(ids))))
        return scores


@incident(
    "bitsandbytes-foundation/bitsandbytes#1382",
    "NVIDIA-NeMo/RL#3544",
    expected=Expected(
        step=3,
        phase="optimizer",
        op="aten.lerp_",
        event="opt:exp_avg",
        loss_finite=True,
        grads_finite=True,
    ),
    accepted=("SG503", "SG603"),
)
def resumed_moments_are_nan(fixed: bool) -> Scene:
    """The weights of a resumed run are fine, but one entry of its moments is NaN: the next update
    kills a weight.
    """
    torch.manual_seed(0)
    model = WordModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch(step: int) -> Batch:
        ids = tokens(4, 6, seed=step, high=9)
        return {"ids": ids, "y": ids.roll(-1, 1)}

    def before(step: int) -> None:
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            if not fixed:
                saved["state"][1]["exp_avg"][2, 3] = NAN
            optimizer.load_state_dict(saved)

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten()),
        optimizer=optimizer,
        steps=5,
        before_step=before,
    )

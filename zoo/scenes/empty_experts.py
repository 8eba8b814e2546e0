"""Experts that no token was routed to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.density_domains import LABELS
from zoo.scenes.parts import randn, sgd


@incident(
    "open-mmlab/mmdetection#3315",
    expected=Expected(step=1, phase="forward", module="experts", op="aten.div", event="nan"),
    accepted=("SG102",),
)
def expert_without_tokens(fixed: bool) -> Scene:
    """A mixture of experts averages the tokens each expert got; one expert got none."""
    torch.manual_seed(0)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(3, 4)

        def forward(self, x: Tensor, route: Tensor) -> Tensor:
            chosen = F.one_hot(route, 3)
            load = chosen.sum(0)
            mean = (chosen.to(x.dtype).T @ self.value(x)) / (load.clamp_min(1) if fixed else load)[
                :, None
            ]
            return chosen.to(x.dtype) @ mean

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.head = Experts(), nn.Linear(4, 2)

        def forward(self, x: Tensor, route: Tensor) -> Tensor:
            return self.head(self.experts(x, route))

    model = Net()

    def batch(step: int) -> Batch:
        return {
            "x": randn(4, 3, seed=step),
            "route": torch.tensor([0, 1, 1 if step == 1 else 2, 0]),
            "y": LABELS,
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b["x"], b["route"]), b["y"])

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))

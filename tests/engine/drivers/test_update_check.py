"""An update that makes NaN of finite gradients is undone and named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stepguard
from scenes import Batch, batches, plain_net, quiet
from stepguard import Guard

DATA = batches(4, size=8)


class TrustRatio(torch.optim.Optimizer):
    """Scales the step by the norm of the weights over that of their gradient, no epsilon."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.01})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.norm() / p.grad.norm()) * p.grad)


@pytest.mark.parametrize("watched", [False, True])
def test_hand_written_update_of_a_zero_gradient_is_undone_and_named(watched: bool) -> None:
    torch.manual_seed(0)
    model = plain_net()
    optimizer = TrustRatio(model.parameters())
    make = stepguard.watch if watched else Guard
    with make(model, optimizer, config=quiet(locate=True)) as guard:
        for step, batch in enumerate(DATA):
            weight = 0.0 if step == 2 else 1.0

            def loss_fn(b: Batch, weight: float = weight) -> Tensor:
                return weight * F.cross_entropy(model(b[0]), b[1])

            if watched:
                optimizer.zero_grad()
                loss_fn(batch).backward()
                optimizer.step()
            else:
                guard.step(loss_fn, batch)
    (incident,) = guard.incidents
    assert incident.step == 2 and incident.verdict.kind == "nonfinite_parameter"
    assert incident.origin is not None and (incident.origin.phase, incident.origin.op) == (
        "optimizer",
        "aten.div",
    )
    assert [finding.code for finding in incident.findings] == ["SG201", "SG502"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())

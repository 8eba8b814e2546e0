"""A disarmed guard does what the user's own loop would do, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from scenes import batches, plain_net, quiet
from stepguard.engine.build import build_context
from stepguard.engine.context import Context
from stepguard.engine.drivers.step import unguarded_step

DATA = batches(4)


def _context(scaler: GradScaler | None = None, **settings: Any) -> Context:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return build_context(model, optimizer, None, scaler, None, None, quiet(**settings))


def _loss_fn(context: Context) -> Any:
    def loss(batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(context.model(inputs), targets)

    return loss


def test_step_is_that_of_a_plain_loop_with_clipping() -> None:
    context = _context(clip_norm=0.5)
    calls: list[int] = []
    context.hooks.updated.append(lambda: calls.append(1))
    assert unguarded_step(context, _loss_fn(context), (DATA[0], DATA[1])).committed
    bare = plain_net()
    for inputs, targets in DATA[:2]:
        nn.functional.cross_entropy(bare(inputs), targets).backward()
    nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    for ours, theirs in zip(context.model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert calls == [1]
    assert context.step == 1
    context.resources.close()


def test_step_that_the_scaler_refuses_is_not_committed() -> None:
    context = _context(scaler=GradScaler("cpu", init_scale=2.0**120))
    before = [p.detach().clone() for p in context.model.parameters()]
    bad = (DATA[0][0] * float("inf"), DATA[0][1])
    assert not unguarded_step(context, _loss_fn(context), (bad,)).committed
    for now, then in zip(context.model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    context.resources.close()

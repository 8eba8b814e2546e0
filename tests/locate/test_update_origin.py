"""Bad values the optimizer makes from finite gradients, and norms that overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .cases import noise
from .loop import Loop


def half_embedding(optimizer: type[torch.optim.Optimizer], **settings: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2)).half()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["ids"]).float(), batch["y"])

    made = optimizer(model.parameters(), lr=1e-3, **settings)  # type: ignore[call-arg]
    return Loop(model, made, loss)


BATCH = {"ids": torch.tensor([1, 2]), "y": torch.tensor([0, 1])}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_epsilon_that_is_zero_in_half_precision(optimizer: type[torch.optim.Optimizer]) -> None:
    origin = half_embedding(optimizer, eps=1e-8, foreach=False).step(0, [BATCH])
    assert origin is not None
    place = (origin.phase, origin.module, origin.op, origin.tensor)
    assert place == ("optimizer", None, "aten.addcdiv_", "param:0.weight")
    evidence = origin.evidence
    assert evidence.eps_underflow and evidence.eps == 1e-08
    assert evidence.zero_denominator and evidence.half_precision
    assert origin.reproduced is True and origin.samples == ()
    # All frames are torch's: a line of the program that asked for the replay would mislead.
    assert origin.source is None


def test_a_foreach_update_names_the_operands_of_the_tensor_that_went_bad() -> None:
    origin = half_embedding(torch.optim.Adam, eps=1e-8, foreach=True).step(0, [BATCH])
    assert origin is not None
    assert (origin.op, origin.tensor) == ("aten._foreach_addcdiv_", "param:0.weight")
    evidence = origin.evidence
    assert evidence.zero_denominator and evidence.zero_numerator and evidence.half_precision
    assert evidence.eps_vanished == 1e-08
    assert [operand.name for operand in origin.inputs[:3]] == ["self", "tensor1", "tensor2"]
    assert {operand.shape for operand in origin.inputs[:3]} == {(6, 4)}
    assert origin.inputs[2].value == 0.0


def test_update_replay_changes_neither_weights_nor_state() -> None:
    loop = half_embedding(torch.optim.Adam, eps=1e-8)
    weights = [p.detach().clone() for p in loop.model.parameters()]
    assert loop.step(0, [BATCH]) is not None
    assert all(torch.equal(a, b) for a, b in zip(weights, loop.model.parameters(), strict=True))
    assert all(not v or float(v.get("step", 0.0)) == 0.0 for v in loop.optimizer.state.values())


def test_update_replay_computes_gradients_again_when_they_are_gone() -> None:
    loop = half_embedding(torch.optim.Adam, eps=1e-8)
    loop.step(0, [BATCH])
    assert loop.last is not None
    step, reading = loop.last
    for parameter in loop.model.parameters():
        parameter.grad = None
    from stepguard.locate import locate

    origin = locate(step, reading)
    assert (origin.op, origin.tensor) == ("aten.addcdiv_", "param:0.weight")
    assert all(p.grad is None for p in loop.model.parameters())


def test_step_hooks_of_the_user_do_not_fire_in_a_replay() -> None:
    loop = half_embedding(torch.optim.Adam, eps=1e-8)
    fired: list[int] = []
    loop.optimizer.register_step_pre_hook(lambda *args: fired.append(1))
    assert loop.step(0, [BATCH]) is not None
    assert fired == [1], "once for the real update, not again for the replay"


def test_learning_rate_that_is_infinite_is_found_in_the_update() -> None:
    model = nn.Linear(3, 1)
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=1e38), lambda x: model(x).pow(2).sum() * 1e3
    )
    origin = loop.step(0, [noise(4, 3)])
    assert origin is not None and (origin.phase, origin.op) == ("optimizer", "aten.add_")
    assert origin.tensor == "param:weight" and origin.evidence.lr == 1e38


def test_finite_gradients_with_an_infinite_norm() -> None:
    model = nn.Linear(100, 1, bias=False)
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda x: (model(x) * 1e20).sum(),
        clip=1.0,
    )
    origin = loop.step(0, [torch.ones(1, 100)])
    assert origin is not None
    assert (origin.phase, origin.module, origin.op) == ("optimizer", None, "aten._foreach_norm")
    assert origin.evidence.finite_norm == pytest.approx(1e21) and origin.reproduced is True
    assert origin.inputs[0].max == pytest.approx(1e20) and math.isinf(origin.output.value)  # type: ignore[union-attr,arg-type]

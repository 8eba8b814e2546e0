"""Finite loss, bad gradient: the backward node, or the forward value that the loss never showed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepguard.locate import locate
from stepguard.records import Evidence

from .cases import Case, Net, check, mse, net_case, noise, with_row
from .loop import Loop

CASES: dict[str, Callable[[], Case]] = {}


def kind(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def backward(
    node: str,
    op: str,
    module: str | None = "act",
    samples: tuple[int, ...] | None = (1,),
    **evidence: Any,
) -> dict:
    return {
        "phase": "backward",
        "module": module,
        "op": op,
        "node": node,
        "evidence": Evidence(**evidence),
        "samples": samples,
    }


@kind
def arccosine_at_one() -> Case:
    place = backward("AcosBackward0", "aten.rsqrt", zero_denominator=True, singular_at=0.0)
    return net_case(lambda x: torch.acos(torch.tanh(x)), with_row(1000.0), **place)


@kind
def fractional_power_at_zero() -> Case:
    return net_case(
        lambda x: x.abs() ** 0.5,
        with_row(0.0),
        **backward("PowBackward0", "aten.pow", negative_power=True),
    )


@kind
def distance_of_a_point_to_itself() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"])
        return ((h[:, None] - h[None]) ** 2).sum(-1).sqrt().mean()

    place = backward("SqrtBackward0", "aten.div", zero_denominator=True, module=None, samples=())
    return Case(nn.Linear(3, 3), {"x": noise(4, 3)}, loss, **place)


@kind
def eigenvectors_of_equal_eigenvalues() -> Case:
    class Basis(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            values, vectors = torch.linalg.eigh(self.weight)
            return x @ vectors * values

    place = backward(
        "LinalgEighBackward0", "aten.div_", zero_denominator=True, module="", samples=()
    )
    return Case(Basis(), {"x": noise(4, 3), "y": noise(4, 3, seed=1)}, mse, **place)


@kind
def gradient_of_a_custom_function() -> Case:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.abs()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return grad * x / x.abs()

    return net_case(
        Sign.apply, with_row(0.0), **backward("SignBackward", "aten.div", zero_denominator=True)
    )


@kind
def gradient_penalty_at_a_zero_gradient() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return ((grad.pow(2).sum(-1).sqrt() - 1) ** 2).mean()

    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    return Case(
        model,
        {"x": noise(4, 3)},
        loss,
        **backward("SqrtBackward0", "aten.div", module=None, samples=()),
    )


@kind
def root_in_an_unselected_branch() -> Case:
    def branch(x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))

    place = backward(
        "SqrtBackward0", "aten.div", unselected=True, selected_against="aten.sqrt", samples=()
    )
    return net_case(branch, **place)


@kind
def root_at_zero_in_an_unselected_branch() -> Case:
    def branch(x: Tensor) -> Tensor:
        return torch.where(x != 0, torch.sqrt(x * x), torch.zeros_like(x))

    place = backward(
        "SqrtBackward0",
        "aten.div",
        unselected=True,
        zero_upstream_gradient=True,
        zero_numerator=True,
    )
    return net_case(branch, with_row(0.0), **place)


@kind
def root_of_a_zero_distance_between_indexed_points() -> Case:
    """The gradient that meets it is 0 as well, but indexing by positions has left nothing out."""

    def normalised(x: Tensor) -> Tensor:
        apart = x[:, torch.tensor([0, 1])] - x[:, torch.tensor([1, 0])]
        unit = apart / (torch.sqrt(apart * apart) + 1e-3)
        return torch.zeros_like(x).index_add(1, torch.tensor([0, 1]), unit)

    return net_case(
        normalised,
        with_row(0.0),
        **backward("SqrtBackward0", "aten.div", zero_upstream_gradient=True),
    )


@kind
def power_at_zero_in_an_unselected_branch() -> Case:
    def branch(x: Tensor) -> Tensor:
        return torch.where(x != 0, x.abs() ** 0.5, torch.zeros_like(x))

    return net_case(branch, with_row(0.0), **backward("PowBackward0", "aten.pow", unselected=True))


@kind
def reciprocal_in_an_unselected_branch() -> Case:
    def branch(x: Tensor) -> Tensor:
        return torch.where(x.abs() > 0, 1 / x, torch.zeros_like(x))

    return net_case(
        branch, with_row(0.0), **backward("ReciprocalBackward0", "aten.mul", unselected=True)
    )


@kind
def logarithm_before_a_masked_fill() -> Case:
    def branch(x: Tensor) -> Tensor:
        return torch.log(x * x).masked_fill(x == 0, 0.0)

    return net_case(branch, with_row(0.0), **backward("LogBackward0", "aten.div", unselected=True))


@kind
def logarithm_before_a_boolean_index() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"]) ** 2
        return torch.log(h)[h > 0].mean()

    place = backward("LogBackward0", "aten.div", unselected=True, module=None)
    return Case(nn.Linear(3, 3, bias=False), {"x": with_row(0.0)}, loss, **place)


@kind
def ratio_in_an_unselected_branch() -> Case:
    def branch(x: Tensor) -> Tensor:
        size = (x * x).sum(-1, keepdim=True)
        return torch.where(size > 0, x / size, x)

    return net_case(branch, with_row(0.0), **backward("DivBackward0", "aten.div", unselected=True))


def forward(
    op: str, module: str | None = "act", samples: tuple[int, ...] = (1,), **evidence: Any
) -> dict:
    return {
        "phase": "forward",
        "module": module,
        "op": op,
        "evidence": Evidence(absorbed=True, **evidence),
        "samples": samples,
    }


@kind
def infinity_absorbed_by_a_clamp() -> Case:
    place = forward("aten.exp", absorbed_by="aten.clamp")
    return net_case(lambda x: torch.exp(x).clamp(max=10.0), with_row(500.0), **place)


@kind
def not_a_number_absorbed_by_nan_to_num() -> Case:
    place = forward("aten.div", absorbed_by="aten.nan_to_num", zero_denominator=True)
    return net_case(lambda x: torch.nan_to_num(x / x), with_row(0.0), **place)


@kind
def infinity_absorbed_by_an_exponential() -> Case:
    return net_case(
        lambda x: torch.exp(-torch.exp(x)),
        with_row(400.0),
        **forward("aten.exp", absorbed_by="aten.exp"),
    )


@kind
def logarithm_of_an_underflown_probability() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_p = torch.log(torch.softmax(model(batch["x"]), -1))
        return -log_p.gather(1, batch["y"][:, None]).mean()

    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(120 * torch.eye(3))
    place = {
        "phase": "loss",
        "module": None,
        "op": "aten.log",
        "evidence": Evidence(argument_from="aten._softmax"),
    }
    return Case(model, {"x": torch.eye(3), "y": torch.arange(3)}, loss, **place)


class Checkpointed(nn.Module):
    """A function that is computed again in the backward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor], reentrant: bool) -> None:
        super().__init__()
        inner = Net(function)
        self.fc, self.act, self.out = inner.fc, inner.act, inner.out
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.act, self.fc(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensor-hooks"])
@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (lambda x: torch.sqrt(x * x), 0.0, backward("SqrtBackward0", "aten.div", singular_at=0.0)),
        (lambda x: torch.exp(-torch.exp(x)), 400.0, forward("aten.exp")),
        (
            lambda x: torch.where(x <= 0, x.exp(), 1 + x),
            400.0,
            backward("ExpBackward0", "aten.mul", unselected=True),
        ),
        (
            lambda x: torch.exp(x),
            400.0,
            {"phase": "forward", "module": "act", "op": "aten.exp", "samples": (1,)},
        ),
    ],
    ids=["singular", "absorbed", "unselected", "loss"],
)
def test_checkpointed_block_is_seen_through(
    function: Callable[[Tensor], Tensor], value: float, expected: dict, reentrant: bool
) -> None:
    batch = {"x": with_row(value), "y": noise(4, 1, seed=5)}
    check(Case(Checkpointed(function, reentrant), batch, mse, **expected))


def test_indexing_by_positions_deselects_nothing() -> None:
    origin = check(CASES["root_of_a_zero_distance_between_indexed_points"]())
    assert not origin.evidence.unselected


@pytest.mark.parametrize("name", sorted(CASES))
def test_origin_of_a_bad_gradient_is_exact(name: str) -> None:
    origin = check(CASES[name]())
    assert origin.source is not None and "test_blame_gradients.py:" in origin.source


def test_gradient_accumulation_overflow_names_the_micro_batch() -> None:
    model = nn.Linear(2, 1, bias=False).half()

    def loss(x: Tensor) -> Tensor:
        return (model(x / 30000.0) * 30000.0).sum()

    micro = [torch.full((1, 2), 30000.0).half() for _ in range(4)]
    origin = Loop(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss).step(0, micro)
    assert origin is not None
    place = (origin.phase, origin.module, origin.op, origin.node, origin.micro_batch)
    assert place == ("backward", None, "aten.add_", "torch::autograd::AccumulateGrad", 2)
    assert origin.source is not None and origin.samples == ()
    assert origin.evidence.half_precision and origin.evidence.finite_in == "float32"


def test_loss_scale_is_part_of_the_replay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(model(batch["x"]).float(), batch["y"])

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, scaler=scaler)
    origin = loop.step(0, [{"x": noise(8, 4) * 4, "y": noise(8, 1) * 4}])
    assert origin is not None and origin.phase == "backward" and origin.reproduced
    assert origin.evidence.half_precision and origin.evidence.finite_in == "float32"
    assert origin.evidence.scale == 2.0**22
    assert loop.last is not None
    step, reading = loop.last
    assert locate(step, replace(reading, overflow=True)).evidence.scale_overflow


def test_criterion_outside_the_model_keeps_its_name() -> None:
    class Focal(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return (1 - z.sigmoid()).pow(0.5).mean()

    model, criterion = nn.Linear(2, 1), Focal()
    nn.init.constant_(model.weight, 5.0)
    loop = Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda x: criterion(model(x)),
        modules={"criterion": criterion},
    )
    origin = loop.step(0, [torch.tensor([[9.0, 9.0], [-0.2, 0.1]])])
    assert origin is not None
    place = (origin.phase, origin.module, origin.op, origin.node)
    assert place == ("backward", "criterion", "aten.pow", "PowBackward0") and origin.samples == (0,)


def test_sparse_gradients_are_followed() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        model.weight[2] = 0

    def loss(ids: Tensor) -> Tensor:
        return model(ids).pow(2).sum(-1).sqrt().mean()

    origin = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss).step(
        0, [torch.tensor([0, 2, 1])]
    )
    assert origin is not None and origin.node == "SqrtBackward0" and origin.samples == (1,)


def test_a_masked_nan_target_is_not_blamed_for_another_bad_value() -> None:
    y = noise(4, 1)
    y[2] = math.nan

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        known = ~batch["y"].isnan()
        error = (model(batch["x"]) - batch["y"]).pow(2) + torch.log(model(batch["x"]) * 0 - 1)
        return torch.where(known, error, 0.0).mean()

    case = Case(
        nn.Linear(3, 1), {"x": noise(4, 3), "y": y}, loss, phase="loss", module=None, op="aten.log"
    )
    check(case)

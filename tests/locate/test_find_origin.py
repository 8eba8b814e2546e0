"""Typical incidents and healthy steps, each with the exact place and element."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from stepguard.records import Evidence

from .cases import Apply, Case, check, mse, net_case, noise, with_row
from .loop import Loop


def test_exp_overflow_inside_a_block_names_block_line_and_sample() -> None:
    origin = check(
        net_case(
            lambda x: torch.exp(x),
            with_row(500.0),
            phase="forward",
            module="act",
            op="aten.exp",
            samples=(1,),
        )
    )
    assert origin.source is not None and "test_find_origin.py:" in origin.source
    assert any("torch.exp(x)" in line for line in origin.context)
    exponent = origin.inputs[0]
    assert exponent.name == "self" and exponent.value is not None and exponent.value > 88


def test_nan_gradient_masked_by_relu_is_healthy() -> None:
    model = nn.Linear(3, 1, bias=False)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        value = model(batch).abs()
        return torch.relu(-torch.sqrt(value)).sum() + model(batch).pow(2).mean()

    assert (
        Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss).step(0, [noise(4, 3)])
        is None
    )


def test_square_root_at_zero_is_a_backward_origin() -> None:
    case = net_case(
        lambda x: torch.sqrt(x * x),
        with_row(0.0),
        phase="backward",
        module="act",
        op="aten.div",
        node="SqrtBackward0",
        samples=(1,),
        evidence=Evidence(zero_denominator=True, singular_at=0.0),
    )
    origin = check(case)
    assert origin.source is not None and "test_find_origin.py" in origin.source


def test_fully_masked_softmax_blames_the_softmax_and_not_the_mask() -> None:
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2] = True

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            torch.softmax(model(batch["x"]).masked_fill(batch["mask"], -math.inf), -1).pow(2).mean()
        )

    check(
        Case(
            nn.Linear(3, 3),
            {"x": noise(4, 3), "mask": mask},
            loss,
            phase="loss",
            module=None,
            op="aten._softmax",
            samples=(2,),
            evidence=Evidence(masked_rows=1, rows=4, intended_inf=True),
        )
    )


def test_nan_in_one_feature_names_batch_element_and_sample() -> None:
    x = noise(5, 4)
    x[3, 1] = math.nan
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    origin = check(
        Case(
            model,
            {"x": x, "y": noise(5, 1)},
            mse,
            phase="input",
            module="0",
            op="aten.addmm",
            tensor="batch:x",
            samples=(3,),
            index=(3, 1),
        )
    )
    assert origin.micro_batch == 0 and math.isnan(origin.inputs[0].value or 0.0)


def test_nan_in_one_weight_names_the_element() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[2].weight[0, 2] = math.nan
    check(
        Case(
            model,
            {"x": noise(4, 3), "y": noise(4, 1)},
            mse,
            phase="state",
            module="2",
            op="aten.addmm",
            tensor="param:2.weight",
            samples=(),
            index=(0, 2),
            evidence=Evidence(bad_elements=1, elements=4),
        )
    )


def test_infinite_gradient_without_any_nan_is_found() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.gain = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.sqrt(self.gain)

    batch = {"x": noise(4, 3), "y": noise(4, 1)}
    check(
        Case(
            Gain(),
            batch,
            mse,
            phase="backward",
            module="",
            op="aten.div",
            node="SqrtBackward0",
            samples=(),
        )
    )


def test_legitimate_minus_infinity_mask_is_healthy() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)
            self.act = Apply(torch.relu)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.act(self.q(x))
            scores = h @ h.transpose(1, 2) + torch.full((5, 5), -math.inf).triu(1)
            return torch.softmax(scores, -1) @ h

    model = Attention()
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: F.mse_loss(model(x), x)
    )
    assert loop.step(0, [noise(2, 5, 4)]) is None

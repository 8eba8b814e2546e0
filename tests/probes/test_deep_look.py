"""A look at one step: rows by module, direction and dtype, and the facts of the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from probes.looked import look_at
from stepguard.probes.deep_look import DeepLook
from stepguard.records.probes import Look, TensorLook


class Squares(nn.Module):
    """Squares in float16, which overflows from 256 on, under a root that absorbs the infinity."""

    def forward(self, x: Tensor) -> Tensor:
        squared = (x.half() * x.half()).float()
        return x / torch.sqrt(1 + squared)


def row(look: Look, module: str, stage: str, dtype: str) -> TensorLook:
    return next(
        one for one in look.tensors if (one.module, one.stage, one.dtype) == (module, stage, dtype)
    )


def test_rows_name_module_direction_and_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    look = look_at(model, lambda x: model(x).square().mean(), torch.randn(8, 4))
    assert row(look, "0", "forward", "float32").largest > 0
    assert row(look, "0", "backward", "float32").largest > 0
    assert row(look, "param:0.weight", "stored", "float32").elements == 16
    headrooms = [one.headroom for one in look.tensors if one.headroom is not None]
    assert headrooms == sorted(headrooms)


def test_headroom_of_half_precision_is_told_in_bits() -> None:
    model = Squares()
    scale = nn.Parameter(torch.tensor(100.0))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    look = look_at(model, lambda x: model(x * scale).sum(), torch.ones(8), optimizer)
    found = row(look, "", "forward", "float16")
    assert found.largest == 10_000.0
    assert found.headroom == pytest.approx(2.71, abs=0.01)
    assert found.infinities == 0


def test_infinity_that_the_step_absorbs_is_counted_where_it_was_born() -> None:
    model = Squares()
    scale = nn.Parameter(torch.tensor(1000.0))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    look = look_at(model, lambda x: model(x * scale).sum(), torch.ones(8), optimizer)
    assert row(look, "", "forward", "float16").infinities == 8
    # the conversion to float32 has them from there
    assert row(look, "", "forward", "float32").infinities == 0


def test_mask_of_minus_infinity_is_not_a_born_infinity() -> None:
    model = nn.Linear(4, 4)
    mask = torch.ones(4, 4).tril() == 0
    look = look_at(
        model,
        lambda x: model(x).masked_fill(mask, -torch.inf).softmax(-1)[:, 0].sum(),
        torch.randn(4, 4),
    )
    assert sum(one.infinities for one in look.tensors) == 0


def test_dropout_and_norms_in_evaluation_mode_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model.eval()
    look = look_at(model, lambda x: model(x).square().mean(), torch.randn(8, 4))
    facts = look.facts
    assert (facts.training, facts.dropout, facts.norms_in_eval) == (False, ("1",), ("2",))


def kept_gradients(passes: int, *, zero: bool) -> bool:
    """What a look says of gradients that are there before the first of several passes."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    look = DeepLook(0, {"": model}, optimizer, set())
    look.begin()
    for number in range(passes):
        loss = model(torch.ones(1, 2)).square().sum()
        if zero and number == 0:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
    look.before_update()
    return look.finish(committed=True).facts.kept_gradients


def test_gradients_of_the_step_before_are_noticed() -> None:
    assert kept_gradients(1, zero=False)
    assert kept_gradients(2, zero=False)
    assert not kept_gradients(1, zero=True)
    # the second backward pass of an accumulated step
    assert not kept_gradients(2, zero=True)

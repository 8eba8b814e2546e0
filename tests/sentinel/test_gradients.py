"""The norm of the gradients, clipping as torch clips, and the mark on a moment's gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stepguard.sentinel.gradients import GradientMark, clip, gradient_norm, scale_gradients


def parameters(*dtypes: torch.dtype, size: float = 3.0) -> list[Tensor]:
    torch.manual_seed(0)
    made: list[Tensor] = []
    for dtype in dtypes:
        parameter = nn.Parameter(torch.zeros(5, dtype=dtype))
        parameter.grad = (torch.randn(5) * size).to(dtype)
        made.append(parameter)
    return made


def grads(made: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in made if p.grad is not None]


KINDS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("dtypes", KINDS)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1000.0])
def test_clipping_is_bit_identical_to_torch(
    dtypes: tuple[torch.dtype, ...], max_norm: float
) -> None:
    ours = parameters(*dtypes)
    theirs = parameters(*dtypes)
    norm = gradient_norm(grads(ours))
    assert norm is not None
    clip(ours, max_norm, norm, known=float(norm.total))
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for mine, wanted in zip(grads(ours), grads(theirs), strict=True):
        assert torch.equal(mine, wanted)


def test_no_gradients_have_no_norm() -> None:
    assert gradient_norm([]) is None


def test_a_norm_that_overflows_half_precision_is_finite_in_float32() -> None:
    made = parameters(torch.float16, torch.float16, size=0.0)
    for parameter in made:
        parameter.grad = torch.full((5,), 30000.0, dtype=torch.float16)
    norm = gradient_norm(grads(made))
    assert norm is not None
    assert math.isfinite(norm.total)
    assert math.isinf(norm.clip)
    clip(made, 1.0, norm)
    after = gradient_norm(grads(made))
    assert after is not None
    assert float(after.total) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_makes_the_norm_bad(bad: float) -> None:
    made = parameters(torch.float32, torch.float32)
    grads(made)[1][2] = bad
    norm = gradient_norm(grads(made), each=True)
    assert norm is not None
    assert not math.isfinite(norm.total)


def test_each_tells_the_smallest_norm_and_leaves_the_total_as_it_is() -> None:
    made = parameters(torch.float32, torch.float32)
    grads(made)[1].zero_()
    plain = gradient_norm(grads(made))
    each = gradient_norm(grads(made), each=True)
    assert plain is not None
    assert each is not None
    assert torch.equal(plain.total, each.total)
    assert each.least is not None
    assert float(each.least) == 0.0


def test_gradients_are_scaled_in_place() -> None:
    made = parameters(torch.float32)
    gradient = grads(made)[0]
    wanted = gradient * 0.5
    scale_gradients(made, 0.5)
    assert made[0].grad is gradient
    assert torch.equal(gradient, wanted)


def test_a_mark_sees_gradients_dropped_replaced_or_written() -> None:
    for change in ("drop", "replace", "write"):
        parameter = parameters(torch.float32)[0]
        mark = GradientMark([parameter])
        assert not mark.gone()
        assert parameter.grad is not None
        if change == "drop":
            parameter.grad = None
        elif change == "replace":
            parameter.grad = parameter.grad.clone()
        else:
            parameter.grad.mul_(2.0)
        assert mark.gone(), change


def test_a_mark_on_no_gradients_is_never_gone() -> None:
    assert not GradientMark([nn.Parameter(torch.zeros(1))]).gone()


def test_norm_of_each_gradient_leaves_the_total_as_torch_has_it() -> None:
    given = [torch.randn(5, 3), torch.randn(7), torch.zeros(2)]
    found = gradient_norm(given, each=True)
    assert found is not None and found.least is not None
    assert torch.equal(found.total, torch.nn.utils.get_total_norm(given))
    assert float(found.least) == 0.0

"""Bad outputs are attributed to inputs that explain them, position by position if possible."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stepguard.locate.operands import Attribution, Call, Read, attribute, flaws

INF = math.inf


def read(values: list[float], *, intended: bool = False, name: str = "self") -> Read:
    tensor = torch.tensor(values)
    maker = Call(index=0, op="aten.full", stage="forward", intended_inf=intended)
    return Read(name, tensor, maker, flaws(tensor))


def explained(
    reads: list[Read], out: list[float], *, exact: bool = True, numbers: tuple[float, ...] = ()
) -> Attribution:
    result = torch.tensor(out)
    return attribute(reads, list(numbers), result, flaws(result), exact)


@pytest.mark.parametrize("exact", [True, False])
def test_bad_input_explains_bad_output(exact: bool) -> None:
    bad = read([1.0, math.nan])
    found = explained([bad, read([1.0, 1.0], name="other")], [2.0, math.nan], exact=exact)
    assert found.causes == (bad,)
    assert not found.first_bad


@pytest.mark.parametrize("exact", [True, False])
def test_output_without_bad_input_is_first_bad(exact: bool) -> None:
    found = explained([read([0.0, 1.0])], [-INF, 0.0], exact=exact)
    assert found.first_bad and not found.causes


def test_value_that_is_not_selected_explains_nothing() -> None:
    dropped = read([math.nan, 1.0])
    found = explained([dropped], [0.0, INF])
    assert found.first_bad and not found.causes
    assert found.where is not None and found.where.tolist() == [False, True]


@pytest.mark.parametrize("exact", [True, False])
def test_mask_explains_infinities_and_never_a_nan(exact: bool) -> None:
    mask = read([-INF, 0.0], intended=True)
    assert explained([mask], [-INF, 1.0], exact=exact).intended_inf
    assert explained([mask], [math.nan, 1.0], exact=exact).first_bad


def test_infinite_constant_is_intended_everywhere() -> None:
    found = explained([read([1.0, 2.0])], [-INF, 2.0], numbers=(-INF,))
    assert found.intended_inf and not found.first_bad


def test_tensor_that_does_not_broadcast_is_compared_as_a_whole() -> None:
    bad = read([math.nan, 1.0, 1.0])
    found = explained([bad], [math.nan, 1.0])
    assert found.causes == (bad,)


def test_sparse_tensor_is_compared_as_a_whole() -> None:
    tensor: Tensor = torch.tensor([math.nan, 1.0]).to_sparse()
    bad = Read("self", tensor, Call(index=0, op="aten.mul", stage="forward"), flaws(tensor))
    assert explained([bad], [math.nan, 1.0]).causes == (bad,)

"""Facts on operators: what they read, write and select, and numbers that are bad by themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stepguard.locate.operands import describe

aten = torch.ops.aten
INF = math.inf


@pytest.mark.parametrize(
    ("func", "base", "foreach"),
    [
        (aten.div.Tensor, "div", False),
        (aten.div_.Tensor, "div", False),
        (aten._foreach_div_.Scalar, "div", True),
    ],
)
def test_variants_of_an_operator_share_a_base(func: Any, base: str, foreach: bool) -> None:
    operator = describe(func)
    assert (operator.base, operator.foreach) == (base, foreach)


def test_in_place_operators_read_and_write_self() -> None:
    operator = describe(aten.add_.Tensor)
    assert operator.writes("self") and operator.reads("self")
    assert not operator.writes("other")


def test_overwriting_operators_do_not_read_what_they_replace() -> None:
    assert not describe(aten.copy_.default).reads("self")
    assert describe(aten.copy_.default).reads("src")
    assert not describe(aten.add.out).reads("out")


def test_shape_is_all_that_matters_to_the_like_operators() -> None:
    assert not describe(aten.zeros_like.default).reads("self")
    assert not describe(aten.new_zeros.default).reads("self")


def test_entry_of_a_list_is_written_with_its_list() -> None:
    operator = describe(aten._foreach_add_.Scalar)
    assert operator.writes("self[3]") and operator.reads("self[3]")


def test_views_are_told_from_in_place_operators() -> None:
    assert describe(aten.view.default).views
    assert not describe(aten.add_.Tensor).views
    assert not describe(aten.add.Tensor).views


@pytest.mark.parametrize(
    ("func", "number", "bad"),
    [
        (aten.mul.Scalar, INF, True),
        (aten.mul.Scalar, 2.0, False),
        (aten.masked_fill.Scalar, -INF, False),
        (aten.masked_fill.Scalar, math.nan, True),
        (aten.clamp.default, INF, False),
    ],
)
def test_infinity_is_bad_only_where_it_is_computed_with(
    func: Any, number: float, bad: bool
) -> None:
    assert (describe(func).bad_number([("value", number)]) is not None) is bad


def test_lists_are_taken_apart_and_shapes_left_out() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    entries = describe(aten.cat.default).entries((tensors, 1), {})
    assert [name for name, _ in entries] == ["tensors[0]", "tensors[1]", "dim"]
    entries = describe(aten.view.default).entries((tensors[0], [1, 1]), {})
    assert [name for name, _ in entries] == ["self"]


def test_indexing_selects_by_a_mask_and_not_by_positions() -> None:
    operator = describe(aten.index.Tensor)
    rows = torch.ones(3)
    by_mask = operator.entries((rows, [torch.tensor([True, False, True])]), {})
    by_position = operator.entries((rows, [torch.tensor([0, 2])]), {})
    assert operator.selects(by_mask)
    assert not operator.selects(by_position)
    assert describe(aten.where.self).selects([])
    assert not describe(aten.add.Tensor).selects([])

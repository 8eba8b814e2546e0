"""Operators, their arguments and numbers, which of them explain a bad output; batches as trees."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stepguard.locate import operands
from stepguard.locate.evidence import Invocation
from stepguard.locate.operands import (
    Call,
    Flaws,
    Read,
    ancestors,
    aten,
    attribute,
    batch_tensors,
    broadcast_index,
    broadcasts,
    describe,
    earliest,
    element,
    first_broken,
    flaws,
    mask_like,
    of_number,
    plain,
    real_maker,
    storage_key,
    summarise,
    unravel,
)
from stepguard.state.batch import sample_count, subset

# --- numbers on a tensor: extremes and counts of the finite part, and the element that is shown

INF = math.inf


def test_summary_counts_kinds_and_bounds_the_finite_part() -> None:
    tensor = torch.tensor([[0.0, 2.0, math.nan], [-3.0, INF, -INF]])
    operand = summarise("self", tensor)
    assert (operand.min, operand.max, operand.zeros) == (-3.0, 2.0, 1)
    assert (operand.nan, operand.posinf, operand.neginf) == (1, 1, 1)
    assert operand.index == (0, 2)
    assert operand.value is not None and math.isnan(operand.value)


def test_summary_of_a_clean_tensor_shows_the_element_asked_for() -> None:
    operand = summarise("self", torch.tensor([1.0, 5.0]), (1,))
    assert (operand.index, operand.value, operand.nan) == ((1,), 5.0, 0)


def test_summary_of_integers_and_of_nothing_finite() -> None:
    operand = summarise("indices", torch.tensor([0, 4, 7]))
    assert (operand.min, operand.max, operand.zeros, operand.dtype) == (0.0, 7.0, 1, "int64")
    operand = summarise("self", torch.tensor([math.nan]))
    assert (operand.min, operand.max) == (None, None)


@pytest.mark.parametrize(
    ("value", "shown"), [(complex(1.0, INF), INF), (complex(-INF, 1.0), -INF), (3 + 4j, 5.0)]
)
def test_complex_element_shows_its_bad_part_or_its_magnitude(value: complex, shown: float) -> None:
    assert element(torch.tensor([value]), (0,)) == shown


def test_element_of_another_shape_is_not_guessed() -> None:
    assert element(torch.ones(2, 2), (0,)) is None
    assert element(torch.ones(2).to_sparse(), (0,)) is None


def test_first_broken_position() -> None:
    assert first_broken(torch.tensor([[1.0, 1.0], [INF, math.nan]])) == (1, 0)
    assert first_broken(torch.ones(2)) is None
    assert unravel(torch.tensor(5), (2, 3)) == (1, 2)


@pytest.mark.parametrize(
    ("shape", "position"),
    [((2, 3), (1, 2)), ((3,), (2,)), ((2, 1), (1, 0)), ((), ()), ((4, 2, 3), None), ((2,), None)],
)
def test_position_before_a_broadcast(
    shape: tuple[int, ...], position: tuple[int, ...] | None
) -> None:
    assert broadcast_index((1, 2), shape) == position
    if position is not None:
        assert broadcasts(shape, (2, 3))


def test_shape_that_does_not_broadcast() -> None:
    assert not broadcasts((2, 2), (2, 3))
    assert not broadcasts((1, 2, 3), (2, 3))


def test_python_numbers_keep_their_kind() -> None:
    assert (of_number("other", 2).dtype, of_number("other", 0.5).dtype) == ("int", "float")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exponents_count_every_finite_element_but_zeros(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -1.5, 2.0, 0.25, math.inf, math.nan], dtype=dtype)
    assert summarise("x", values).exponents == ((-2, 1), (0, 2), (1, 1))


def test_exponents_of_a_large_tensor_are_those_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "MOST_COUNTED", 100)
    ((exponent, count),) = summarise("x", torch.ones(1000)).exponents
    assert exponent == 0 and count <= 100


# --- facts on operators: what they read, write and select, and numbers that are bad by themselves

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "base", "foreach"),
    [
        (ATEN.div.Tensor, "div", False),
        (ATEN.div_.Tensor, "div", False),
        (ATEN._foreach_div_.Scalar, "div", True),
    ],
)
def test_variants_of_an_operator_share_a_base(func: Any, base: str, foreach: bool) -> None:
    operator = describe(func)
    assert (operator.base, operator.foreach) == (base, foreach)


def test_in_place_operators_read_and_write_self() -> None:
    operator = describe(ATEN.add_.Tensor)
    assert operator.writes("self") and operator.reads("self")
    assert not operator.writes("other")


def test_overwriting_operators_do_not_read_what_they_replace() -> None:
    assert not describe(ATEN.copy_.default).reads("self")
    assert describe(ATEN.copy_.default).reads("src")
    assert not describe(ATEN.add.out).reads("out")


def test_shape_is_all_that_matters_to_the_like_operators() -> None:
    assert not describe(ATEN.zeros_like.default).reads("self")
    assert not describe(ATEN.new_zeros.default).reads("self")


def test_entry_of_a_list_is_written_with_its_list() -> None:
    operator = describe(ATEN._foreach_add_.Scalar)
    assert operator.writes("self[3]") and operator.reads("self[3]")


def test_views_are_told_from_in_place_operators() -> None:
    assert describe(ATEN.view.default).views
    assert not describe(ATEN.add_.Tensor).views
    assert not describe(ATEN.add.Tensor).views


@pytest.mark.parametrize(
    ("func", "number", "bad"),
    [
        (ATEN.mul.Scalar, INF, True),
        (ATEN.mul.Scalar, 2.0, False),
        (ATEN.masked_fill.Scalar, -INF, False),
        (ATEN.masked_fill.Scalar, math.nan, True),
        (ATEN.clamp.default, INF, False),
    ],
)
def test_infinity_is_bad_only_where_it_is_computed_with(
    func: Any, number: float, bad: bool
) -> None:
    assert (describe(func).bad_number([("value", number)]) is not None) is bad


def test_lists_are_taken_apart_and_shapes_left_out() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    entries = describe(ATEN.cat.default).entries((tensors, 1), {})
    assert [name for name, _ in entries] == ["tensors[0]", "tensors[1]", "dim"]
    entries = describe(ATEN.view.default).entries((tensors[0], [1, 1]), {})
    assert [name for name, _ in entries] == ["self"]


def test_indexing_selects_by_a_mask_and_not_by_positions() -> None:
    operator = describe(ATEN.index.Tensor)
    rows = torch.ones(3)
    by_mask = operator.entries((rows, [torch.tensor([True, False, True])]), {})
    by_position = operator.entries((rows, [torch.tensor([0, 2])]), {})
    assert operator.selects(by_mask)
    assert not operator.selects(by_position)
    assert describe(ATEN.where.self).selects([])
    assert not describe(ATEN.add.Tensor).selects([])


# --- finite or not, for every layout; and which infinities are a mask


def sparse(value: float) -> Tensor:
    positions = torch.tensor([[0, 0, 2]])
    values = torch.tensor([1.0, value, 3.0])
    return torch.sparse_coo_tensor(positions, values, (4,), check_invariants=True)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, math.nan]), Flaws(nan=True)),
        (torch.tensor([1.0, -INF]), Flaws(inf=True)),
        (torch.tensor([3e38, 3e38]), Flaws()),
        (torch.tensor([60000.0, 60000.0], dtype=torch.float16), Flaws()),
        (torch.tensor([complex(1.0, math.nan)]), Flaws(nan=True)),
        (torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn), Flaws(nan=True)),
        (sparse(math.nan), Flaws(nan=True)),
        (sparse(2.0), Flaws()),
        (torch.empty(3, device="meta"), Flaws()),
        (torch.empty(0), Flaws()),
    ],
)
def test_kinds_of_bad_elements(tensor: Tensor, expected: Flaws) -> None:
    assert flaws(tensor) == expected


def test_values_of_a_sparse_tensor_keep_their_memory() -> None:
    tensor = sparse(2.0)
    assert plain(tensor).data_ptr() == tensor._values().data_ptr()
    assert storage_key(tensor) == storage_key(tensor._values())


def test_views_share_the_key_of_their_memory() -> None:
    tensor = torch.ones(4, 4)
    assert storage_key(tensor[1:, 2]) == storage_key(tensor)
    assert storage_key(tensor.clone()) != storage_key(tensor)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -INF, 0.0, 0.0], True),
        ([0.1, 0.2, -INF, 0.4], True),
        ([0.1, 0.2, 0.3, 0.4, 0.5, -INF], False),
        ([0.0, INF], False),
        ([0.0, -INF, math.nan], False),
    ],
)
def test_mask_is_minus_infinity_around_a_constant_or_much_of_it(
    values: list[float], expected: bool
) -> None:
    assert mask_like(torch.tensor(values)) is expected


# --- bad outputs are attributed to inputs that explain them, position by position if possible


def read(values: list[float], *, intended: bool = False, name: str = "self") -> Read:
    tensor = torch.tensor(values)
    maker = Call(index=0, op="aten.full", stage="forward", intended_inf=intended)
    return Read(name, tensor, maker, flaws(tensor))


def explained(
    reads: list[Read], out: list[float], *, exact: bool = True, numbers: tuple[float, ...] = ()
) -> Call:
    result = torch.tensor(out)
    found = Call(index=1, op="aten.mul", stage="forward", out=flaws(result))
    attribute(found, reads, numbers, result, exact=exact)
    return found


@pytest.mark.parametrize("exact", [True, False])
def test_bad_input_explains_bad_output(exact: bool) -> None:
    bad = read([1.0, math.nan])
    found = explained([bad, read([1.0, 1.0], name="other")], [2.0, math.nan], exact=exact)
    assert found.causes == (bad.maker,)
    assert not found.first_bad


@pytest.mark.parametrize("exact", [True, False])
def test_output_without_bad_input_is_first_bad(exact: bool) -> None:
    found = explained([read([0.0, 1.0])], [-INF, 0.0], exact=exact)
    assert found.first_bad and not found.causes


def test_value_that_is_not_selected_explains_nothing() -> None:
    dropped = read([math.nan, 1.0])
    call = Call(index=1, op="aten.where", stage="forward", out=Flaws(inf=True))
    where = attribute(call, [dropped], (), torch.tensor([0.0, INF]), exact=True)
    assert call.first_bad and not call.causes
    assert where is not None and where.tolist() == [False, True]


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
    assert found.causes == (bad.maker,)


def test_sparse_tensor_is_compared_as_a_whole() -> None:
    tensor: Tensor = torch.tensor([math.nan, 1.0]).to_sparse()
    bad = Read("self", tensor, Call(index=0, op="aten.mul", stage="forward"), flaws(tensor))
    assert explained([bad], [math.nan, 1.0]).causes == (bad.maker,)


# --- the graph of calls: makers behind copies, and what bad values lead back to


def call(index: int, op: str = "aten.mul", **fields: object) -> Call:
    return Call(index=index, op=op, stage="forward", **fields)  # type: ignore[arg-type]


def test_maker_is_found_behind_casts_and_copies() -> None:
    made = call(0)
    cast = call(1, "aten._to_copy", parents=(made,))
    assert real_maker(call(2, "aten.clone", parents=(cast,))) is made


def test_ancestors_follow_causes_and_not_every_parent() -> None:
    innocent = call(0)
    first = call(1)
    second = call(2, parents=(innocent, first), causes=(first,))
    last = call(3, causes=(second, first))
    assert {one.index for one in ancestors(last)} == {1, 2, 3}


def test_infinity_written_on_purpose_is_not_harmful() -> None:
    mask = call(0, out=Flaws(inf=True), intended_inf=True)
    assert not mask.harmful
    assert call(1, out=Flaws(inf=True)).harmful
    assert call(2, out=Flaws(nan=True), intended_inf=True).harmful


def test_earliest_call_ran_first() -> None:
    assert earliest([]) is None
    first = call(1)
    assert earliest([call(3), first]) is first


def test_operators_are_named_as_the_dispatcher_names_them() -> None:
    assert aten("clone copy_") == {"aten.clone", "aten.copy_"}


# --- the arguments of an operation: what it used, and what met the bad element


def named_read(name: str, tensor: Tensor) -> Read:
    return Read(name, tensor, Call(index=0, op="aten.ones", stage="forward"))


def division(above: Tensor, below: Tensor) -> Invocation:
    reads = [named_read("self", above), named_read("other", below)]
    func = torch.ops.aten.div.Tensor
    invocation = Invocation(describe(func), func, (above, below), {}, reads, [])
    call = Call(index=1, op="aten.div", stage="forward")
    return replace(invocation, call=call, out=above / below)


def test_element_that_met_the_bad_one_is_found_through_a_broadcast() -> None:
    bad_op = division(torch.ones(2, 3), torch.tensor([1.0, 0.0, 2.0]))
    assert bad_op.index == (0, 1)
    assert bad_op.at("other") == 0.0
    assert bad_op.at("self") == 1.0
    assert bad_op.at("rounding_mode") is None


def test_known_position_goes_before_the_first_bad_element() -> None:
    bad_op = division(torch.ones(3), torch.tensor([0.0, 1.0, 0.0]))
    bad_op.where = torch.tensor([False, False, True])
    assert bad_op.index == (2,)


def test_number_stands_for_itself() -> None:
    func = torch.ops.aten.div.Scalar
    x = torch.ones(2)
    invocation = Invocation(
        describe(func), func, (x, 0.0), {}, [named_read("self", x)], [("other", 0.0)]
    )
    bad_op = replace(invocation, out=x / 0.0)
    assert bad_op.at("other") == 0.0


def test_overwritten_argument_is_not_used() -> None:
    func = torch.ops.aten.copy_.default
    reads = [named_read("self", torch.ones(1)), named_read("src", torch.ones(1))]
    invocation = Invocation(describe(func), func, (), {}, reads, [])
    assert [one.name for one in invocation.used] == ["src"]


def test_one_position_of_a_foreach_operation() -> None:
    func = torch.ops.aten._foreach_mul.ScalarList
    tensors = [torch.ones(1), torch.full((1,), math.nan)]
    reads = [named_read(f"self[{position}]", tensor) for position, tensor in enumerate(tensors)]
    numbers = [("scalars[0]", 2.0), ("scalars[1]", 3.0)]
    invocation = Invocation(describe(func), func, (tensors, [2.0, 3.0]), {}, reads, numbers)
    only = invocation.only(1)
    assert only.reads[0].name == "self" and only.reads[0].tensor is tensors[1]
    assert only.numbers == [("scalars", 3.0)]
    assert only.args == ([tensors[1]], [3.0])


# --- batches as trees of named tensors
# --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "a"


class Own:
    def __init__(self) -> None:
        self.x = torch.ones(2)
        self.note = "kept"


def names(batch: Any) -> list[str]:
    return [name for name, _ in batch_tensors(batch)]


def test_tensors_are_named_by_their_way_through_the_tree() -> None:
    one = torch.ones(2)
    assert names(one) == ["batch"]
    assert names({"x": one, "boxes": [one, (one, 3)]}) == [
        "batch:x",
        "batch:boxes.0",
        "batch:boxes.1.0",
    ]
    assert names(Pair(one, one)) == ["batch:x", "batch:y"]
    assert names(Frozen(one)) == ["batch:x"]
    assert names(UserDict(x=one)) == ["batch:x"]
    assert names(Own()) == ["batch:x"]


def test_samples_are_counted_and_picked() -> None:
    batch = {"x": torch.arange(6.0).reshape(3, 2), "files": ["a", "b", "c"], "scale": 2.0}
    assert sample_count(batch) == 3
    kept = subset(batch, [0, 2], 3)
    assert kept["x"].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert kept["files"] == ["a", "c"]
    assert kept["scale"] == 2.0


def test_as_many_views_as_samples_stay_whole() -> None:
    views = [torch.ones(2, 3), torch.zeros(2, 3)]
    kept = subset({"views": views, "y": torch.arange(2)}, [1], 2)
    assert len(kept["views"]) == 2 and kept["views"][0].shape == (1, 3)

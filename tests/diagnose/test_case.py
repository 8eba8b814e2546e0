"""Questions that rules ask about one bad step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diagnose.diagnose_literals import number, origin, out, tensor
from stepguard.diagnose import Case
from stepguard.diagnose.case import has_zero, high, low, met, reach
from stepguard.records import Evidence, Origin, Reading, Verdict


def case(where: Origin | None = None, **reading: Any) -> Case:
    verdict = Verdict(kind="nonfinite_loss", severity="incident")
    return Case(reading=Reading(step=1, **reading), verdict=verdict, origin=where)


@pytest.mark.parametrize(
    ("op", "name"),
    [("aten._foreach_addcdiv_", "addcdiv"), ("aten.log", "log"), ("mine::op", "mine::op")],
)
def test_operation_is_named_without_packet_foreach_and_in_place(op: str, name: str) -> None:
    assert case(origin("forward", op)).op == name


@pytest.mark.parametrize(
    ("node", "name"),
    [("SqrtBackward0", "Sqrt"), ("torch::autograd::AccumulateGrad", "AccumulateGrad")],
)
def test_node_is_named_without_its_number(node: str, name: str) -> None:
    assert case(origin("backward", None, node=node)).node == name


def test_a_case_without_origin_answers_harmlessly() -> None:
    empty = case()
    assert (empty.op, empty.node, empty.tensor, empty.phase, empty.inputs) == ("", "", "", "", ())
    assert empty.evidence == Evidence() and empty.place == "the step" and not empty.operated


def test_argument_is_found_by_its_name() -> None:
    where = origin(
        "forward", "aten.div", tensor("self", (1,), 1.0, 1.0), tensor("other", (1,), 2.0, 2.0)
    )
    found = case(where).argument("other")
    assert found is not None and found.max == 2.0
    assert case(where).argument("exponent") is None


def test_of_a_list_argument_the_most_telling_tensor_is_taken() -> None:
    where = origin(
        "optimizer",
        "aten._foreach_div_",
        tensor("other[0]", (1,), 1.0, 1.0),
        tensor("other[1]", (1,), 0.0, 0.0, zeros=1),
    )
    found = case(where).argument("other")
    assert found is not None and found.name == "other[1]"


def test_the_bad_operand_is_an_input_before_the_output() -> None:
    where = origin(
        "forward", "aten.mul", tensor("self", (2,), 0.0, 1.0, nan=1), output=out(posinf=1)
    )
    bad = case(where).bad_operand
    assert bad is not None and bad.name == "self"


def test_an_infinity_under_a_finite_loss_was_absorbed() -> None:
    where = origin("forward", "aten.exp", output=out(posinf=1))
    assert case(where, loss=0.5, grads_finite=False).absorbed
    assert not case(where, loss=math.inf, grads_finite=False).absorbed


def test_the_element_at_the_bad_position_counts_more_than_the_range() -> None:
    known = tensor("x", (4,), -1.0, 5.0, zeros=1, index=(2,), value=3.0)
    assert met(known) == (3.0, 3.0) and not has_zero(known)
    unknown = tensor("x", (4,), -1.0, 5.0, zeros=1)
    assert met(unknown) == (-1.0, 5.0) and has_zero(unknown)


def test_ranges_of_numbers_and_of_nothing() -> None:
    assert (low(number("eps", 2.0)), high(number("eps", 2.0))) == (2.0, 2.0)
    nothing = tensor("x", (0,), None, None)
    assert math.isnan(low(nothing)) and reach(nothing) == 0.0


def test_place_names_operation_node_module_and_line() -> None:
    where = origin("backward", "aten.div", node="SqrtBackward0", module="act", source="a.py:3")
    assert case(where).place == "aten.div (SqrtBackward0) in act at a.py:3"

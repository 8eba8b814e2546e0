"""The arguments of an operation: what it used, and what met the bad element."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from stepguard.locate.evidence import Invocation
from stepguard.locate.operands import Call, Read, describe


def read(name: str, tensor: Tensor) -> Read:
    return Read(name, tensor, Call(index=0, op="aten.ones", stage="forward"))


def division(above: Tensor, below: Tensor) -> Invocation:
    reads = [read("self", above), read("other", below)]
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
    invocation = Invocation(describe(func), func, (x, 0.0), {}, [read("self", x)], [("other", 0.0)])
    bad_op = replace(invocation, out=x / 0.0)
    assert bad_op.at("other") == 0.0


def test_overwritten_argument_is_not_used() -> None:
    func = torch.ops.aten.copy_.default
    reads = [read("self", torch.ones(1)), read("src", torch.ones(1))]
    invocation = Invocation(describe(func), func, (), {}, reads, [])
    assert [one.name for one in invocation.used] == ["src"]


def test_one_position_of_a_foreach_operation() -> None:
    func = torch.ops.aten._foreach_mul.ScalarList
    tensors = [torch.ones(1), torch.full((1,), math.nan)]
    reads = [read(f"self[{position}]", tensor) for position, tensor in enumerate(tensors)]
    numbers = [("scalars[0]", 2.0), ("scalars[1]", 3.0)]
    invocation = Invocation(describe(func), func, (tensors, [2.0, 3.0]), {}, reads, numbers)
    only = invocation.only(1)
    assert only.reads[0].name == "self" and only.reads[0].tensor is tensors[1]
    assert only.numbers == [("scalars", 3.0)]
    assert only.args == ([tensors[1]], [3.0])

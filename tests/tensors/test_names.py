"""Dotted names below several roots, and the parameters of an optimizer."""

from __future__ import annotations

import torch
from torch import nn

from stepguard.tensors.names import (
    dotted,
    named_buffers,
    named_modules,
    named_parameters,
    names_by_id,
    optimizer_parameter_ids,
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.values import dtype_name


def test_an_empty_part_leaves_no_dot() -> None:
    assert dotted("", "weight") == "weight"
    assert dotted("criterion", "") == "criterion"
    assert dotted("criterion", "weight") == "criterion.weight"


def test_names_carry_the_prefix_of_their_root() -> None:
    roots = {"": nn.Sequential(nn.BatchNorm1d(2)), "criterion": nn.Linear(2, 1, bias=False)}
    parameters = [name for name, _ in named_parameters(roots)]
    buffers = [name for name, _ in named_buffers(roots)]
    modules = [name for name, _ in named_modules(roots)]
    assert parameters == ["0.weight", "0.bias", "criterion.weight"]
    assert buffers == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert modules == ["", "0", "criterion"]


def test_names_by_id_finds_equal_tensors_apart() -> None:
    first = torch.zeros(1)
    second = torch.zeros(1)
    names = names_by_id([("first", first), ("second", second)])
    assert names[id(first)] == "first"
    assert names[id(second)] == "second"


def test_optimizer_parameters_follow_the_groups() -> None:
    a = nn.Parameter(torch.zeros(1))
    b = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [b]}, {"params": [a]}], lr=0.1)
    assert [id(p) for p in optimizer_parameters(optimizer)] == [id(b), id(a)]
    assert optimizer_parameter_ids(optimizer) == {id(a), id(b)}


def test_a_parameter_outside_every_module_is_named_by_its_group() -> None:
    model = nn.Linear(1, 1, bias=False)
    loose = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [loose]}], lr=0.1)
    names = [name for _, name in parameter_names({"": model}, optimizer)]
    assert names == ["weight", "group1[0]"]


def test_a_shared_parameter_is_named_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for _, name in parameter_names({"": model, "twin": model}, optimizer)]
    assert names == ["weight"]


def test_dtype_names_have_no_torch_in_front() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"

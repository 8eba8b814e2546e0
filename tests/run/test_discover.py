"""What belongs to an optimizer, found among the objects of the process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from stepguard.engine.drivers.schedule import scheduler_of
from stepguard.run.guarded_script import LooseParameters, share, trained_by, variable_name
from stepguard.tensors.names import optimizer_parameter_ids


def test_model_is_the_outermost_module_with_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert trained_by(optimizer)[0] is model
    assert share(model[0], optimizer_parameter_ids(optimizer)) == 2


@pytest.mark.slow
def test_called_model_is_preferred_to_a_container_around_it() -> None:
    model = nn.Linear(2, 1)
    container = nn.ModuleDict({"model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert trained_by(optimizer)[0] is container
    assert trained_by(optimizer, called=model)[0] is model


def test_further_modules_have_the_names_of_their_variables() -> None:
    body = nn.Linear(4, 4)
    head = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    model, modules = trained_by(optimizer)
    assert model is body
    assert modules == {"head": head}
    assert variable_name(head) == "head"


def test_parameters_of_no_module_get_one() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = trained_by(optimizer)[0]
    assert isinstance(model, LooseParameters)
    assert [id(p) for p in model.parameters()] == [id(weight)]


@pytest.mark.slow
def test_scheduler_is_the_outermost_of_a_chain() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    assert scheduler_of(optimizer) is None
    parts = [LinearLR(optimizer), ConstantLR(optimizer)]
    chain = SequentialLR(optimizer, parts, milestones=[3])
    assert scheduler_of(optimizer) is chain

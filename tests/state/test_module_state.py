"""Tensors of a module out and in again: misfits in words, buffers that came or grew since."""

from __future__ import annotations

import torch
from torch import nn

from stepguard.state.buffers import fill_module, module_misfit, module_tensors, why_not_kept


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("late", None)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("repeated", torch.zeros(1).expand(3))


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module_tensors(model).items()}


def test_buffers_that_state_dict_leaves_out_are_kept_and_expanded_ones_are_not() -> None:
    assert list(module_tensors(Late())) == ["linear.weight", "linear.bias", "hidden"]


def test_values_go_into_the_same_tensors() -> None:
    model = Late()
    weight = model.linear.weight
    stored = copied(model)
    with torch.no_grad():
        weight.fill_(9.0)
    fill_module(model, stored)
    assert model.linear.weight is weight
    assert torch.equal(weight, stored["linear.weight"])


def test_a_buffer_that_was_made_or_resized_is_registered_again() -> None:
    model = Late()
    stored = {**copied(model), "late": torch.ones(4), "hidden": torch.ones(5)}
    assert module_misfit("model/", model, stored, may_lack=False) == ""
    fill_module(model, stored)
    assert torch.equal(model.late, torch.ones(4))
    assert torch.equal(model.hidden, torch.ones(5))


def test_a_lazy_parameter_takes_the_stored_shape() -> None:
    model = nn.LazyLinear(2)
    stored = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    assert module_misfit("model/", model, stored, may_lack=False) == ""
    fill_module(model, stored)
    assert model.weight.shape == (2, 3)


def test_misfits_name_the_tensor_and_both_sides() -> None:
    model = Late()
    stored = copied(model)
    lacking = {name: t for name, t in stored.items() if name != "linear.bias"}
    why = "model/linear.bias is in the model and not in the saved state"
    assert module_misfit("model/", model, lacking, may_lack=False) == why
    assert module_misfit("model/", model, lacking, may_lack=True) == ""
    strange = {**stored, "other": torch.zeros(1)}
    assert "model/other is in the saved state" in module_misfit(
        "model/", model, strange, may_lack=False
    )
    wide = {**stored, "linear.bias": torch.zeros(3)}
    assert module_misfit("", model, wide, may_lack=False) == (
        "linear.bias is float32 [2] in the model and float32 [3] in the saved state"
    )


def test_tensors_that_cannot_be_kept_say_why() -> None:
    assert why_not_kept(torch.zeros(1)) == ""
    assert "no data" in why_not_kept(torch.empty(1, device="meta"))
    assert "no shape" in why_not_kept(nn.LazyLinear(2).weight)
    assert "only dense ones" in why_not_kept(torch.eye(2).to_sparse())

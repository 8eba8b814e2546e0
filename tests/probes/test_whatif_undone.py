"""Trials leave every object as it was; a module can be run in float32 for the time of one."""

from __future__ import annotations

import torch
from torch import nn

from engine.parts import step_of
from scenes import batches, difference, plain_net
from stepguard.probes.whatif import in_float32, kept_program, undone
from stepguard.state.run_state import RunState


def test_weights_optimizer_hooks_and_random_numbers_end_as_they_began() -> None:
    step = step_of(batches(1)[0])
    step.optimizer = torch.optim.Adam(step.model.parameters())
    calls: list[int] = []
    step.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    random = torch.get_rng_state()
    with undone(step, RunState(step.named_roots(), step.optimizer)):
        nn.functional.cross_entropy(step.model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
        step.optimizer.step()
        assert difference(dict(step.model.state_dict()), before) != ""
    assert difference(dict(step.model.state_dict()), before) == ""
    assert not step.optimizer.state
    assert calls == []
    assert torch.equal(torch.get_rng_state(), random)
    step.optimizer.step()
    assert calls == [1]


def test_what_a_fix_puts_into_the_model_is_taken_out_again() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = model[2]
    with kept_program([model], optimizer):
        model[2] = nn.Identity()
        model.extra = nn.Linear(1, 1)
        model.forward = lambda inputs: inputs
        model[0].register_forward_hook(lambda *_: None)
        optimizer.param_groups[0]["lr"] = 3.0
    assert model[2] is head
    assert not hasattr(model, "extra")
    assert model(torch.zeros(1, 6)).shape == (1, 3)
    assert not model[0]._forward_hooks
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_module_in_half_precision_computes_in_float32_and_returns_what_the_next_one_takes() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    inputs = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert model[0](inputs).isinf().all()
    with in_float32(model, whole=True):
        out = model(inputs)
    assert out.dtype is torch.float32
    assert out.isfinite().all()
    with in_float32(model[0], whole=False):
        assert model[0](inputs).dtype is torch.float16
    assert "forward" not in vars(model)


def test_module_under_autocast_computes_in_float32() -> None:
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
        with in_float32(model, whole=False):
            assert model(torch.ones(1, 2)).dtype is torch.float32

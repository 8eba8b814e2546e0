"""What hooks remember of gradients goes back with a vetoed step, in the same objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from stepguard.state.buffers import AttachedState
from stepguard.state.python_state import KeptContainer, KeptTensor


class Memory:
    """A hook's memory: one tensor is replaced in every step, one is written in place."""

    def __init__(self) -> None:
        self.errors: dict[int, Tensor] = {0: torch.zeros(3)}
        self.factor = torch.ones(2)
        self.steps = 0
        self.seen: list[int] = []
        self.call = len

    def step(self, value: float) -> None:
        self.errors[0] = self.errors[0] + value
        self.factor.mul_(1.0 + value)
        self.steps += 1
        self.seen.append(self.steps)


def _kept(item: Any) -> AttachedState:
    return AttachedState(lambda: {"hook": item})


def test_bad_step_leaves_no_trace() -> None:
    memory = Memory()
    state = _kept(memory)
    for _ in range(3):
        state.remember()
        memory.step(1.0)
    state.remember()
    errors = memory.errors[0]
    memory.step(float("nan"))
    memory.errors[1] = torch.full((1,), torch.nan)
    assert state.restore() == []
    assert memory.errors == {0: errors} and memory.errors[0].tolist() == [3.0] * 3
    assert memory.factor.tolist() == [8.0, 8.0]
    assert (memory.steps, memory.seen, memory.call) == (3, [1, 2, 3], len)


def test_tensor_replaced_in_every_step_is_not_copied() -> None:
    memory = Memory()
    state = _kept(memory)
    for _ in range(3):
        state.remember()
        memory.step(1.0)
    state.remember()
    errors = state._kept[id(memory)]._children["errors"]
    assert isinstance(errors, KeptContainer)
    held = errors._children[0]
    assert isinstance(held, KeptTensor)
    assert held.live is memory.errors[0] and held.saved is None


def test_held_tensor_that_is_overwritten_is_reset_and_named() -> None:
    memory = Memory()
    state = _kept(memory)
    for _ in range(3):
        state.remember()
        memory.step(1.0)
    state.remember()
    memory.errors[0].fill_(torch.nan)
    assert state.restore() == ["dict 0"]
    assert memory.errors[0].tolist() == [0.0] * 3


def test_state_of_power_sgd_goes_into_fresh_objects() -> None:
    used = PowerSGDState(None, start_powerSGD_iter=2)
    used.iter = 7
    used.error_dict[0] = torch.arange(3.0)
    used.rng.randint(10)
    fresh = PowerSGDState(None, start_powerSGD_iter=2)
    fresh.p_memory_dict[4] = torch.ones(1)
    _kept(fresh).load_state_dict(_kept(used).state_dict())
    assert fresh.iter == 7 and fresh.p_memory_dict == {}
    assert torch.equal(fresh.error_dict[0], used.error_dict[0])
    assert fresh.error_dict[0] is not used.error_dict[0]
    assert fresh.rng.randint(1000) == used.rng.randint(1000)


def test_object_without_a_stored_state_stays() -> None:
    memory = Memory()
    memory.step(1.0)
    _kept(memory).load_state_dict({})
    assert memory.steps == 1

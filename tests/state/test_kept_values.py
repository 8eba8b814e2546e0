"""A vetoed step, an undone update or a replay leaves no trace; values return to their objects."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.optim import Optimizer

from stepguard.state.buffers import AttachedState, BufferKeeper, UndoCopy
from stepguard.state.python_state import (
    MANY,
    SMALL,
    AttributeKeeper,
    Scope,
    WithoutGraph,
    holds_only_data,
    keep,
    original,
)

BIG = SMALL + 1

# --- attributes of modules


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "list of tensors": (lambda: [torch.zeros(2)], lambda v: v[0].add_(1)),
    "nested": (lambda: {"a": [1, {"b": torch.zeros(1)}]}, lambda v: v["a"][1]["b"].fill_(7)),
    "order": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "default": (lambda: defaultdict(list), lambda v: v["new"].append(1)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "array": (lambda: np.zeros(3), lambda v: v.__iadd__(1)),
    "tensor": (lambda: torch.zeros(3), lambda v: v.fill_(torch.nan)),
    "large tensor": (lambda: torch.zeros(BIG), lambda v: v.fill_(1)),
    "tuple": (lambda: (torch.zeros(2), [1]), lambda v: (v[0].add_(1), v[1].clear())),
    "object": (
        lambda: SimpleNamespace(n=1, seen=[]),
        lambda v: (setattr(v, "n", 2), v.seen.append(1)),
    ),
    "long list": (lambda: list(range(2 * MANY)), lambda v: v.append(1)),
    "long dict": (lambda: dict.fromkeys(range(2 * MANY), 0), lambda v: v.update(new=1)),
}


def shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)


@pytest.mark.parametrize("looks", [1, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_value_changed_in_place_comes_back_in_place(name: str, looks: int) -> None:
    make, change = CHANGES[name]
    module, keeper = Holder(make()), AttributeKeeper()
    for _ in range(looks):
        keeper.remember([module])
    value, before = module.value, shown(module.value)
    assert not keeper.moved()
    change(value)
    assert keeper.moved()
    keeper.restore()
    assert module.value is value
    assert shown(value) == before
    assert not keeper.moved()


def test_attributes_bound_anew_made_or_deleted_by_the_step_are_as_before() -> None:
    old = torch.zeros(3)
    module, keeper = Holder(old), AttributeKeeper()
    module.other = 2
    keeper.remember([module])
    module.value = torch.full((3,), torch.nan)
    module.cache = torch.zeros(1)
    del module.other
    keeper.restore()
    assert module.value is old and module.other == 2 and not hasattr(module, "cache")


def test_memory_takes_the_present_value_when_it_is_refreshed() -> None:
    value: dict[str, Any] = {"a": [1]}
    value["circle"] = value
    kept = keep(value, Scope())
    assert kept is not None and not kept.moved(set())
    value["a"].append(2)
    kept.refresh(set())
    assert not kept.moved(set())
    value["a"].clear()
    value["more"] = 1
    kept.restore(set())
    assert value["a"] == [1, 2] and "more" not in value


@pytest.mark.parametrize("value", [3, "text", None, print, nn.Linear(1, 1), torch.float32])
def test_what_cannot_change_or_does_something_is_left_alone(value: object) -> None:
    assert keep(value, Scope()) is None


def test_object_is_only_data_if_all_it_holds_is() -> None:
    data = (1, "a", None, {"a": [1]}, torch.zeros(1), np.zeros(1))
    assert all(map(holds_only_data, (*data, SimpleNamespace(n=[1, {"x": torch.zeros(1)}]))))
    others = (print, nn.Linear(1, 1), logging.getLogger("x"), list(range(MANY + 1)))
    assert not any(map(holds_only_data, (*others, SimpleNamespace(call=print), [len])))


def test_graph_of_a_held_tensor_is_freed() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    large = torch.ones(BIG, requires_grad=True) * 2
    value = [loss]
    kept, held, too_large = keep(value, Scope()), WithoutGraph(loss), WithoutGraph(large)
    assert kept is not None
    value[0] = torch.zeros(1)
    kept.restore(set())
    assert value[0] is loss and original(held, None) is loss
    del loss, large, value, kept
    gc.collect()
    values = original(held, None)
    assert values.grad_fn is None and float(values) == 2.0
    assert original(too_large, "otherwise") == "otherwise" and original(3, "otherwise") == 3


# --- buffers


class Table(nn.Module):
    """A module with one buffer."""

    def __init__(self, values: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("table", values)


def _fill(module: Table) -> None:
    module.table.fill_(7)


def _reassign(module: Table) -> None:
    module.table = module.table * torch.ones(1, requires_grad=True)


def _drop(module: Table) -> None:
    module.table = None


@pytest.mark.parametrize("change", [_fill, _reassign, _drop])
@pytest.mark.parametrize("size", [1, SMALL, BIG])
def test_buffer_comes_back_as_the_same_tensor_with_the_same_values(
    change: Callable[[Table], None], size: int
) -> None:
    module = Table(torch.ones(size))
    tensor = module.table
    keeper = BufferKeeper([module])
    for value in (1.0, 2.0):
        tensor.fill_(value)
        keeper.remember()
        change(module)
        keeper.restore()
        assert module.table is tensor and tensor.grad_fn is None
        assert bool((tensor == value).all())


def test_small_buffer_written_behind_the_version_counter_comes_back() -> None:
    module = Table(torch.ones(4))
    keeper = BufferKeeper([module])
    keeper.remember()
    module.table.data.fill_(5.0)
    keeper.remember()
    module.table.data.fill_(9.0)
    keeper.restore()
    assert module.table.tolist() == [5.0] * 4


def test_large_buffer_written_behind_the_version_counter_is_never_thrown_back_by_steps() -> None:
    module = Table(torch.zeros(BIG))
    keeper = BufferKeeper([module])
    for step in range(1, 4):
        keeper.remember()
        module.table.data.fill_(float(step))  # an EMA codebook, for instance
    keeper.restore()
    assert bool((module.table == 3.0).all())


def test_large_untouched_buffer_is_not_copied_again() -> None:
    module = Table(torch.ones(BIG))
    keeper = BufferKeeper([module])
    keeper.remember()
    (saved,) = keeper._copies.values()
    saved.saved.fill_(123.0)  # would be overwritten by a copy
    keeper.remember()
    assert bool((saved.saved == 123.0).all())
    module.table.add_(1.0)
    keeper.remember()
    assert bool((saved.saved == 2.0).all())


def test_buffer_that_was_none_is_none_again_until_a_step_has_made_it() -> None:
    module = Table(None)
    keeper = BufferKeeper([module])
    keeper.remember()
    module.table = torch.full((3,), torch.nan)
    keeper.restore()
    assert module.table is None
    module.table = torch.ones(3)
    keeper.remember()
    module.table.fill_(torch.nan)
    keeper.restore()
    assert module.table.tolist() == [1.0] * 3


def test_shared_and_expanded_buffers_of_several_roots_come_back() -> None:
    shared = torch.ones(2)
    model = nn.ModuleList([Table(shared), Table(shared), Table(torch.arange(3.0).expand(5, 3))])
    criterion = Table(torch.ones(2))
    keeper = BufferKeeper([model, criterion])
    for _ in range(2):
        keeper.remember()
    model[0].table, model[1].table = torch.zeros(2), torch.zeros(2)
    shared.fill_(9.0)
    criterion.table.zero_()
    keeper.restore()
    assert model[0].table is shared and model[1].table is shared
    assert shared.tolist() == criterion.table.tolist() == [1.0, 1.0]
    assert model[2].table[4].tolist() == [0.0, 1.0, 2.0]


# --- what hooks remember of gradients


class Memory:
    """A hook's memory: one tensor is replaced in every step, one is written in place."""

    def __init__(self) -> None:
        self.errors: dict[int, Tensor] = {0: torch.zeros(3)}
        self.factor, self.steps, self.call = torch.ones(2), 0, len
        self.seen: list[int] = []

    def step(self, value: float) -> None:
        self.errors[0] = self.errors[0] + value
        self.factor.mul_(1.0 + value)
        self.steps += 1
        self.seen.append(self.steps)


def _kept(item: Any) -> AttachedState:
    return AttachedState(lambda: {"hook": item})


@pytest.mark.parametrize("overwritten", [False, True])
def test_bad_step_leaves_no_trace_in_the_memory_of_a_hook(overwritten: bool) -> None:
    memory = Memory()
    state = _kept(memory)
    for _ in range(3):
        state.remember()
        memory.step(1.0)
    state.remember()
    errors = memory.errors[0]
    if overwritten:
        # it was replaced in every step and not copied: nothing is left but to reset and name it
        errors.fill_(torch.nan)
        assert state.restore() == ["dict 0"]
        assert memory.errors[0].tolist() == [0.0] * 3
        return
    memory.step(torch.nan)
    memory.errors[1] = torch.full((1,), torch.nan)
    assert state.restore() == []
    assert memory.errors == {0: errors} and errors.tolist() == [3.0] * 3
    assert memory.factor.tolist() == [8.0, 8.0]
    assert (memory.steps, memory.seen, memory.call) == (3, [1, 2, 3], len)


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
    _kept(fresh).load_state_dict({})
    assert fresh.iter == 7


# --- an update that is undone


class Odd:
    __slots__ = ("value",)


class HoldsOdd(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.odd = Odd()


def test_what_cannot_be_compared_is_named() -> None:
    assert UndoCopy(HoldsOdd([nn.Parameter(torch.zeros(1))])).restore() == ("HoldsOdd.odd (Odd)",)


# --- a step that is run again

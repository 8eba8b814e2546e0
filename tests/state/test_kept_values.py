"""A vetoed step, an undone update or a replay leaves no trace; values return to their objects."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.optim import SGD, Adam, Optimizer

from stepguard.state.batch import Step
from stepguard.state.buffers import AttachedState, BufferKeeper, UndoCopy
from stepguard.state.isolation import reevaluate, rerun, untouched
from stepguard.state.python_state import (
    MANY,
    SMALL,
    AttributeKeeper,
    ModuleCounters,
    Scope,
    WithoutGraph,
    holds_only_data,
    keep,
    original,
)
from stepguard.state.rng import capture_rng

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


def test_functions_modes_and_parameters_stay_as_the_step_left_them() -> None:
    weight = nn.Parameter(torch.zeros(2))
    module, keeper = Holder([weight]), AttributeKeeper()
    keeper.remember([module])
    module.hook = len
    module.eval()
    with torch.no_grad():
        weight.add_(1)
    keeper.restore()
    assert module.hook is len and not module.training
    assert weight.tolist() == [1.0, 1.0]  # the optimizer's


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


def test_parameters_are_remembered_only_where_everything_is() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    assert keep(parameter, Scope()) is None
    kept = keep(parameter, Scope("update"))
    assert kept is not None
    # The version counter does not see a write through .data.
    parameter.data.fill_(3.0)
    assert kept.moved(set())
    kept.restore(set())
    assert float(parameter.detach()) == 0.0


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


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.limit, self.flag, self.inner = 0, 10, True, nn.BatchNorm1d(2)


def test_numbers_that_modules_count_with_are_state_once_they_have_moved() -> None:
    model = nn.Sequential(Counting())
    counting: Any = model[0]
    counters, alone = ModuleCounters({"model/": model}), ModuleCounters({"model/": counting})
    assert counters.moved() == alone.moved() == {}
    counting.calls, counting.flag, counting.inner.eps = 2, False, 0.5
    saved = counters.moved()
    assert saved == {"model/0:calls": 2} and alone.moved() == {"model/:calls": 2}
    counting.calls, counting.limit = 5, 20
    counters.put_back(saved, {"model/": {"0"}})
    assert (counting.calls, counting.limit) == (5, 20)  # left out
    counters.put_back(saved)
    assert (counting.calls, counting.limit) == (2, 10)
    # without a saved value, a number goes back to its first one, but not where it is left out
    counting.calls = 7
    counters.put_back({}, {"model/": {"0"}})
    assert counting.calls == 7
    counters.put_back({})
    assert counting.calls == 0


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


def test_module_converted_or_added_between_steps_is_remembered_anew() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    keeper = BufferKeeper([model])
    keeper.remember()
    model.append(nn.BatchNorm1d(2)).double()
    keeper.remember()
    model(torch.randn(4, 2, dtype=torch.float64))
    keeper.restore()
    assert model[0].running_mean.dtype == torch.float64
    assert [layer.running_mean.tolist() for layer in model] == [[0.0, 0.0]] * 2


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


def test_update_is_undone_in_the_same_tensors_and_what_it_made_is_removed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    copy = UndoCopy(optimizer)
    optimizer.step()
    assert copy.restore() == ()
    assert len(optimizer.state) == 0 and parameter.tolist() == [1.0, 1.0]
    optimizer.step()
    before, moment = parameter.detach().clone(), optimizer.state[parameter]["exp_avg"]
    kept, copy = moment.clone(), UndoCopy(optimizer)
    optimizer.step()
    assert copy.restore() == ()
    assert torch.equal(parameter, before)
    assert optimizer.state[parameter]["exp_avg"] is moment and torch.equal(moment, kept)


class Odd:
    __slots__ = ("value",)


class HoldsOdd(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.odd = Odd()


def test_what_cannot_be_compared_is_named() -> None:
    assert UndoCopy(HoldsOdd([nn.Parameter(torch.zeros(1))])).restore() == ("HoldsOdd.odd (Odd)",)


# --- a step that is run again


class Replayed(nn.Module):
    """Dropout, batch statistics, and buffers that are expanded, created late, or written through
    `.data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("positions", torch.arange(3.0).expand(4, 3))
        self.register_buffer("late", None)
        self.register_buffer("codebook", torch.zeros(BIG))

    def forward(self, x: Tensor) -> Tensor:
        self.late = x.detach().mean(0)
        self.codebook.data.add_(1.0)
        return self.drop(self.norm(self.fc(x + self.positions[0])))


def test_step_runs_again_to_the_same_loss_and_leaves_no_trace() -> None:
    model = Replayed()
    keeper = BufferKeeper([model])
    step = Step(
        0,
        model,
        SGD(model.parameters(), lr=0.1),
        {},
        keeper,
        lambda x: model(x).square().mean(),
        (torch.randn(4, 3),),
    )
    keeper.remember()
    step.rng.append(capture_rng())
    assert step.loss_fn is not None
    loss = step.loss_fn(step.micro_batches[0])
    assert isinstance(loss, Tensor)
    loss.backward()
    buffers = {name: (id(b), b.clone()) for name, b in model.named_buffers()}
    grads, randomness = [p.grad for p in model.parameters()], torch.get_rng_state()
    assert rerun(step).losses == (loss.item(),)
    assert reevaluate(step) == loss.item()
    for name, buffer in model.named_buffers():
        assert id(buffer) == buffers[name][0] and torch.equal(buffer, buffers[name][1])
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), randomness)


def test_gradients_modes_hooks_and_warnings_of_a_replay_are_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    gradient = model[0].weight.grad = torch.ones(2, 2)
    calls: list[int] = []
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    filters, mean = list(warnings.filters), model[1].running_mean.clone()
    step = Step(0, model, SGD(model.parameters(), lr=0.1), {}, BufferKeeper([model]))
    with untouched(step):
        assert model[0].weight.grad is None
        model(torch.randn(4, 2)).sum().backward()
        warnings.warn("again", stacklevel=1)
        model.eval()
    assert model[0].weight.grad is gradient and torch.equal(gradient, torch.ones(2, 2))
    assert model.training and torch.equal(model[1].running_mean, mean)
    assert list(warnings.filters) == filters and calls == []
    model(torch.randn(4, 2)).sum().backward()
    assert calls == [1]
    hook.remove()

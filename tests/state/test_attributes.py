"""Attributes of modules come back in the very objects that were there."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepguard.state.buffers import UndoCopy
from stepguard.state.python_state import MANY, AttributeKeeper


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _ordered() -> OrderedDict[str, int]:
    return OrderedDict(a=1, b=2)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "list of tensors": (lambda: [torch.zeros(2)], lambda v: v[0].add_(1)),
    "nested": (lambda: {"a": [1, {"b": 2}]}, lambda v: v["a"][1].update(b=3)),
    "order": (_ordered, lambda v: v.move_to_end("a")),
    "default": (lambda: defaultdict(list), lambda v: v["new"].append(1)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "array": (lambda: np.zeros(3), lambda v: v.__iadd__(1)),
    "tensor": (lambda: torch.zeros(3), lambda v: v.fill_(torch.nan)),
    "large tensor": (lambda: torch.zeros(100_000), lambda v: v.fill_(1)),
    "tuple": (lambda: (torch.zeros(2),), lambda v: v[0].add_(1)),
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


def test_attribute_that_is_bound_anew_gets_its_old_object_back() -> None:
    old = torch.zeros(3)
    module, keeper = Holder(old), AttributeKeeper()
    keeper.remember([module])
    module.value = torch.full((3,), torch.nan)
    keeper.restore()
    assert module.value is old


def test_attribute_that_the_step_made_is_gone_and_a_deleted_one_is_back() -> None:
    module, keeper = Holder(1), AttributeKeeper()
    module.other = 2
    keeper.remember([module])
    module.cache = torch.zeros(1)
    del module.other
    keeper.restore()
    assert not hasattr(module, "cache")
    assert module.other == 2


def test_functions_and_modes_stay_as_the_step_left_them() -> None:
    module, keeper = Holder(None), AttributeKeeper()
    keeper.remember([module])
    module.hook = len
    module.value = print
    module.eval()
    keeper.restore()
    assert module.hook is len
    assert module.value is print
    assert not module.training


def test_parameters_in_a_list_are_left_to_the_optimizer() -> None:
    weight = nn.Parameter(torch.zeros(2))
    module, keeper = Holder([weight]), AttributeKeeper()
    keeper.remember([module])
    with torch.no_grad():
        weight.add_(1)
    keeper.restore()
    assert weight.tolist() == [1.0, 1.0]


def test_undo_copy_takes_a_tensor_that_two_optimizers_share_once() -> None:
    weight = nn.Parameter(torch.zeros(2))
    outer, inner = (torch.optim.SGD([weight], lr=0.1, momentum=0.9) for _ in range(2))
    outer.inner = inner  # type: ignore[attr-defined]
    undo = UndoCopy(outer)
    weight.grad = torch.ones(2)
    outer.step()
    inner.step()
    inner.param_groups[0]["lr"] = 7.0
    undo.restore()
    assert weight.tolist() == [0.0, 0.0]
    assert (len(outer.state), len(inner.state), inner.param_groups[0]["lr"]) == (0, 0, 0.1)

"""State that a loss function keeps for itself is found, compared and put back."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stepguard.locate.replay import LossFunctionState


def test_changed_state_is_named_and_restored() -> None:
    state: dict[str, Any] = {"step": 3, "limit": math.nan, "seen": [1, 2]}
    own = LossFunctionState(lambda: state)
    state["step"] += 1
    state["seen"].append(3)
    assert own.changed() == ("the number `state['step']`", "the list `state['seen']`")
    own.restore()
    assert state["step"] == 3 and state["seen"] == [1, 2]
    assert own.changed() == ()


def test_nothing_is_put_back_while_another_thread_may_have_changed_it() -> None:
    state, done = {"next": 3}, threading.Event()
    own = LossFunctionState(lambda: state)
    other = threading.Thread(target=done.wait, name="prefetch")
    other.start()
    try:
        state["next"] += 1
        own.restore()
        assert state["next"] == 4
    finally:
        done.set()
        other.join()


GENERATORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item()),
    "python": (random.Random(1), lambda g: g.random()),
    "numpy": (np.random.default_rng(1), lambda g: g.random()),
    "old numpy": (np.random.RandomState(1), lambda g: g.rand()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_go_back_to_where_they_were(name: str) -> None:
    generator, draw = GENERATORS[name]
    state = LossFunctionState(lambda: generator)
    first = draw(generator)
    assert state.changed() == ("the generator `generator`",)
    state.restore()
    assert draw(generator) == first


def test_counter_is_named_although_it_cannot_be_put_back() -> None:
    counter = itertools.count()
    state = LossFunctionState(lambda: counter)
    next(counter)
    assert state.changed() == ("the counter `counter`",)


def test_tensor_changed_in_place_is_put_back_by_value_and_object() -> None:
    kept = {"center": torch.ones(3)}
    before = kept["center"]
    state = LossFunctionState(lambda: kept)
    before.mul_(2.0)
    kept["center"] = torch.zeros(3)
    state.restore()
    assert kept["center"] is before
    assert before.tolist() == [1.0, 1.0, 1.0]


class Scaled:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, batch: Any, factor: float = 1.0) -> float:
        self.calls += 1
        return factor


def test_attribute_of_a_bound_method_inside_a_partial_is_found() -> None:
    scaled = Scaled()
    state = LossFunctionState(functools.partial(scaled.loss, factor=2.0))
    scaled.loss(None)
    assert state.changed() == ("the number `self.calls`",)
    state.restore()
    assert scaled.calls == 0


def test_modules_are_left_to_the_step() -> None:
    model = torch.nn.BatchNorm1d(2)
    state = LossFunctionState(lambda: model)
    model.running_mean.add_(1.0)
    assert state.changed() == ()

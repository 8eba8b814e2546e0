"""What a healthy step does not do: read generators that nothing drew from, list what it knows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import stepguard
from stepguard.state import rng

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "number": random.random,
    "first of a pair": lambda: random.gauss(0.0, 1.0),
    "both of a pair": lambda: (random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)),
    "seed": lambda: random.seed(7),
    "shuffle": lambda: random.shuffle(list(range(9))),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_python_generator_is_captured_as_it_is(first: str, second: str) -> None:
    before = random.getstate()
    try:
        random.seed(0)
        for name in (first, second):
            rng.capture_rng()
            DRAWS[name]()
            assert rng.capture_rng().python == random.getstate()
    finally:
        random.setstate(before)


def test_cached_normal_number_is_captured_after_it_was_put_back() -> None:
    """The same memory with and without it."""
    before = random.getstate()
    try:
        random.seed(0)
        random.gauss(0.0, 1.0)
        with_number = random.getstate()
        without = (*with_number[:2], None)
        for state in (with_number, without, with_number):
            random.setstate(state)
            assert rng.capture_rng().python == state
    finally:
        random.setstate(before)


@pytest.mark.parametrize("frozen", ["first", "last", "none"])
def test_norm_of_a_clipping_is_taken_over(frozen: str) -> None:
    """The norm before clipping is read, also where the ends of the model have no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for name, index in (("first", 0), ("last", 2)):
        model[index].requires_grad_(frozen != name)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            (100.0 * model(torch.randn(8, 4)).square().mean()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            assert guard._context.history.norms[-1] == float(norm) > 0.1


def test_clipping_a_part_is_not_the_norm_of_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = stepguard.GuardConfig(terminal="quiet")
    ends = [*model[0].parameters(), *model[2].parameters()]
    with stepguard.watch(model, optimizer, config=config) as guard:
        model(torch.randn(8, 4)).square().mean().backward()
        part = nn.utils.clip_grad_norm_(ends, 1e9)
        whole = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        assert guard._context.history.norms[-1] == float(whole) > float(part)

"""A wrapper goes in, and what was there comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from stepguard.tensors.names import swapped, wrap


class Counter:
    def count(self) -> int:
        return 1


def plus_one(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: original(*args) + 1


def test_wrapping_an_instance_leaves_nothing_behind() -> None:
    counter = Counter()
    with ExitStack() as undo:
        wrap(undo, counter, "count", plus_one)
        assert counter.count() == 2
    assert counter.count() == 1
    assert "count" not in vars(counter)


def test_wrapping_a_class_puts_its_own_method_back() -> None:
    before = vars(Counter)["count"]
    with ExitStack() as undo:
        wrap(undo, Counter, "count", plus_one)
        assert Counter().count() == 2
    assert vars(Counter)["count"] is before


def test_a_later_wrapper_is_not_thrown_away() -> None:
    counter = Counter()
    with ExitStack() as undo:
        wrap(undo, counter, "count", plus_one)
        later = plus_one(counter.count)
        counter.count = later  # type: ignore[method-assign]
    assert counter.count is later


def test_swapped_replaces_a_value_for_the_block() -> None:
    counter = Counter()
    counter.limit = 3  # type: ignore[attr-defined]
    with swapped(counter, "limit", 5):
        assert counter.limit == 5  # type: ignore[attr-defined]
    assert counter.limit == 3  # type: ignore[attr-defined]

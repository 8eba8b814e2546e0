"""A script's model, optimizer and loss can be borrowed from its first guarded step."""

from __future__ import annotations

from typing import Any

import pytest

from stepguard.engine.protect import StepTaken, borrowing, offer, taking


def _loss(batch: Any) -> Any:
    return batch


def test_nothing_happens_in_an_ordinary_run() -> None:
    assert not borrowing()
    offer("context", _loss)


def test_step_that_is_taken_unwinds_the_script() -> None:
    seen: list[Any] = []

    def take(context: Any, loss_fn: Any) -> bool:
        seen.append((context, loss_fn))
        return context == "second"

    with taking(take):
        assert borrowing()
        offer("first", _loss)
        with pytest.raises(StepTaken):
            offer("second", _loss)
    assert not borrowing()
    assert [context for context, _ in seen] == ["first", "second"]


def test_handlers_of_exceptions_do_not_stop_it() -> None:
    assert not issubclass(StepTaken, Exception)

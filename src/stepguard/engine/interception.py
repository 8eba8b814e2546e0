"""Borrowing a script's model, optimizer and loss: the first guarded step is handed to someone else
instead of run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepguard.state.step import LossFn

Taker = Callable[[Any, LossFn], bool]
"""Gets the guard's context and the loss function of the step; False leaves the step to the guard.
"""
_takers: list[Taker] = []


class StepTaken(BaseException):
    """Unwinds the user's script once its objects have been used; not an Exception, so no handler of
    theirs stops it.
    """


@contextmanager
def taking(taker: Taker) -> Iterator[None]:
    """While this is open, every `guard.step` is offered to `taker`; where it takes one, the script
    ends.
    """
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def borrowing() -> bool:
    """Is a script being run only for its objects? Then its guards write no files."""
    return bool(_takers)


def offer(context: Any, loss_fn: LossFn) -> None:
    """Called by every guard before its step; does nothing in an ordinary run."""
    if _takers and _takers[-1](context, loss_fn):
        raise StepTaken

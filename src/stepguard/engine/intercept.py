"""Borrowing a script's model, optimizer and loss: the first guarded step is handed to someone else instead of run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepguard.engine.context import Context
from stepguard.state.step import LossFn

Taker = Callable[[Context, LossFn], None]
_takers: list[Taker] = []


class StepTaken(BaseException):
    """Unwinds the user's script once its objects have been used; not an Exception, so no handler of theirs stops it."""


@contextmanager
def taking(taker: Taker) -> Iterator[None]:
    """While this is open, the first `guard.step` goes to `taker`, and the script ends there."""
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def offer(context: Context, loss_fn: LossFn) -> None:
    """Called by every guard before its step; does nothing in an ordinary run."""
    if _takers:
        _takers[-1](context, loss_fn)
        raise StepTaken

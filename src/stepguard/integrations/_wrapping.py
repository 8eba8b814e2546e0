"""Putting a wrapper in the place of one object's method, and taking it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes what is there and returns what comes in its place."""


def wrap(undo: ExitStack, owner: Any, name: str, make: Make) -> None:
    """Wrap `owner.name`; closing `undo` puts back what was there, unless somebody has wrapped ours
    since.
    """
    before = vars(owner).get(name)
    ours = make(getattr(owner, name))
    setattr(owner, name, ours)

    def put_back() -> None:
        if vars(owner).get(name) is not ours:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    undo.callback(put_back)


@contextmanager
def swapped(owner: Any, name: str, other: Any) -> Iterator[None]:
    """`owner.name` is `other` inside, and afterwards what it was."""
    with ExitStack() as undo:
        wrap(undo, owner, name, lambda original: other)
        yield

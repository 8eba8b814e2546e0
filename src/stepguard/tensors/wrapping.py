"""Put a wrapper in the place of an attribute, and put the original back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original and returns the wrapper."""


def wrap(undo: ExitStack, owner: Any, name: str, make: Make) -> None:
    """Wrap `owner.name`; closing `undo` puts it back, unless it was wrapped again since."""
    # The owner's own attribute: None for a method that an instance or a class only inherits.
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
    """Make `owner.name` be `other` inside the block."""
    with ExitStack() as undo:
        wrap(undo, owner, name, lambda original: other)
        yield

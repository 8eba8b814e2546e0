"""Items: a stable id, a title, and a function that looks at the inspection and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepguard.preflight.answers import Answer
from stepguard.preflight.inspection import Inspection

Look = Callable[[Inspection], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that is checked."""

    id: str
    """Stable, `section.name`."""
    title: str
    """What is expected."""
    look: Look
    last: bool = False
    """Run after all other items, because any of them may read a key of the configuration."""


def item(id: str, title: str, *, last: bool = False) -> Callable[[Look], Item]:
    """Turn a function of the inspection into an item; `items/__init__.py` collects them."""

    def make(look: Look) -> Item:
        return Item(id=id, title=title, look=look, last=last)

    return make

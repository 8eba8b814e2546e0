"""All items, in the order they are shown.

An item is a function with the decorator `item` in one of these modules; it needs no other
registration. A new module is one line in TOPICS; a test compares TOPICS with this folder.
"""

from __future__ import annotations

from stepguard.preflight.inspection import Item
from stepguard.preflight.items import (
    checklist,
    checkpoint,
    config,
    data,
    labels,
    lr,
    model,
    norm,
    optimizer,
    precision,
    resources,
    scaler,
)

TOPICS = (
    precision,
    scaler,
    optimizer,
    norm,
    lr,
    config,
    labels,
    data,
    model,
    checkpoint,
    resources,
    checklist,
)


def _collect() -> tuple[Item, ...]:
    """Every Item of every module, in the order of definition."""
    found: list[Item] = []
    for topic in TOPICS:
        # A module keeps its names in the order they were defined.
        found += [value for value in vars(topic).values() if isinstance(value, Item)]
    return tuple(found)


ITEMS: tuple[Item, ...] = _collect()

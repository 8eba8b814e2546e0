"""What an item is: a stable id, a title, and a look at the inspection that ends in an answer with
evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepguard.preflight.answers import Seen
from stepguard.preflight.inspection import Inspection


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that is looked at."""

    id: str
    title: str
    look: Callable[[Inspection], Seen]

"""Where to go back to: the newest good place where the remedy has not been tried yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from stepguard.records.settings import Policy

Data = Literal["repeat", "skip", "reorder"]
"""What is done with the steps since: run again as they were, left behind, or run again in another
order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A state that is known to be good."""

    step: int
    kind: Literal["snapshot", "checkpoint"] = "snapshot"
    timeline: int = 0
    """Rewinds before it was taken: after a rewind a run passes the same step numbers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A place, what happens to the data since, and what the learning rates are multiplied by."""

    place: Place
    data: Data
    lr_factor: float | None = None


def choose(
    places: Sequence[Place],
    tried: Collection[Remedy],
    policy: Policy,
    *,
    repeatable: bool,
    rewinds: int,
) -> Remedy | None:
    """The next remedy; None when each has been tried. `places` are newest first.

    `repeatable`: the fault may be gone when the steps since the newest place run again exactly as
    they were.
    """
    if not places:
        return None
    exact = Remedy(place=places[0], data="repeat")
    if repeatable and exact not in tried:
        return exact
    factor = policy.lr_factor ** (rewinds + 1) if policy.rewind_lr == "lower" else None
    used = {remedy.place for remedy in tried if remedy.data != "repeat"}
    fresh = [place for place in places if place not in used]
    if fresh:
        return Remedy(place=fresh[0], data=policy.rewind_data, lr_factor=factor)
    slower = Remedy(place=places[0], data=policy.rewind_data, lr_factor=factor)
    return slower if factor is not None and slower not in tried else None

"""What the policy chose to do about an incident."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["retry", "skip", "rewind", "lower_lr", "stop", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action, why it was that one, and how much of each budget is used."""

    action: Action
    reason: str = ""
    consecutive: int = 0
    """Incidents in a row up to and including this one."""
    total: int = 0
    """Incidents since the run began."""
    lr_factor: float | None = None
    """With `lower_lr`, and with a rewind that lowers it: every group's learning rate is multiplied by this."""
    new_scale: float | None = None
    """The static loss scale to go on with, where the scale was the cause."""
    rewound_to: int | None = None
    """With `rewind`: the optimizer steps that are left after it."""
    data: str | None = None
    """With `rewind`: `repeat`, `skip` or `reorder` the steps since."""

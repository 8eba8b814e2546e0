"""What the policy chose to do about an incident."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["skip", "rewind", "lower_lr", "stop", "warn"]


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
    """With `lower_lr`: every group's learning rate is multiplied by this."""
    new_scale: float | None = None
    """The static loss scale to go on with, where the scale was the cause."""

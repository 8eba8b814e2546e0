"""What the policy chose to do about an incident."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["leave_out", "skip", "retry", "undo", "heal", "rewind", "lower_lr", "stop", "note"]
"""`leave_out`: the update was made without what was proven guilty. `undo`: the optimizer made the
bad value, its update was taken back. `heal`: a damaged rank was given the state of a healthy one.
`note`: told, nothing done.
"""


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
    """Multiplies every group's learning rate, with `lower_lr` and with a rewind that lowers it."""
    new_scale: float | None = None
    """The static loss scale to go on with, where the scale was the cause."""
    new_eps: float | None = None
    """The optimizer's epsilon to go on with, with `Policy(on_incident="whatif")`."""
    new_clip: float | None = None
    """The norm to clip to from here on, with `Policy(on_incident="whatif")`."""
    rewound_to: int | None = None
    """With `rewind`: the optimizer steps that are left after it."""
    left_out: str = ""
    """What the update was made without, in words: `sample 5`, `micro-batch 2 of 4`."""
    data: str | None = None
    """With `rewind`: `repeat`, `skip` or `reorder` the steps since."""
    not_restored: str = ""
    """What a vetoed update moved and could not be put back, in words; empty: nothing."""

"""Tell accelerate's optimizer wrapper that an update did not happen, so schedules wait."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from types import MethodType
from typing import Any

from stepguard.guard import Guard
from stepguard.tensors.wrapping import wrap


def hold_schedule(wrapper: Any, guard: Guard, undo: ExitStack) -> None:
    """Make accelerate's schedulers, and the Trainer, leave the schedule after a vetoed update."""
    # They ask `step_was_skipped`, which reads the private `_is_overflow`. Without a scaler
    # accelerate never resets it, so it is written after every step.

    def make(original: Any) -> Any:
        # wraps() keeps the mark by which torch's schedulers know a step they have wrapped.
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            by_scaler = self.scaler is not None and self._is_overflow
            self._is_overflow = guard.port.dropped or by_scaler
            return out

        # A method, because a scheduler that is made later wraps it once more as one.
        return MethodType(step, wrapper)

    wrap(undo, wrapper, "step", make)
    undo.callback(setattr, wrapper, "_is_overflow", False)

"""accelerate's optimizer wrapper: its inner optimizer, and how it is told that an update did not
happen.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from types import MethodType
from typing import Any

from stepguard.guard import Guard
from stepguard.tensors.wrapping import wrap


def hold_schedule(wrapper: Any, guard: Guard, undo: ExitStack) -> None:
    """After a vetoed update accelerate's schedulers, and the Trainer, leave the schedule where it
    is.

    They ask `step_was_skipped`, which is the private `_is_overflow`; the only place that writes it
    for us. Without a scaler nobody else ever resets it.
    """

    def make(original: Any) -> Any:
        @functools.wraps(
            original
        )  # keeps the mark by which torch's schedulers know a step they have wrapped
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            by_scaler = self.scaler is not None and self._is_overflow
            self._is_overflow = guard.port.dropped or by_scaler
            return out

        return MethodType(
            step, wrapper
        )  # a method, because a scheduler made later wraps it once more as one

    wrap(undo, wrapper, "step", make)
    undo.callback(setattr, wrapper, "_is_overflow", False)

"""The one place where stepguard's own faults end: it disarms with a warning, and the run goes on.

A fault in what only explains a bad step costs the explanation; protection goes on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from stepguard._errors import TrainingHalted

P = ParamSpec("P")
T = TypeVar("T")


class GuardDisarmed(RuntimeWarning):
    """stepguard met a fault of its own and no longer protects this run."""


class NotExplained(RuntimeWarning):
    """A bad step was caught, and a fault of stepguard's own kept it from being explained. It still protects."""


class Shield:
    """Calls the guard's own code. Never wraps the user's: their exceptions pass through untouched."""

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self.armed = True
        self._on_fault = on_fault

    def call(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, or `default` when disarmed or when it fails."""
        if not self.armed:
            return default
        try:
            return function(*args, **kwargs)
        except TrainingHalted:
            raise
        except Exception as fault:
            self.disarm(fault)
            return default

    def last(self, function: Callable[[], None]) -> None:
        """A parting word, also when disarmed; then a second fault is not worth a second warning."""
        if self.armed:
            self.call(None, function)
            return
        with contextlib.suppress(Exception):
            function()

    def disarm(self, fault: Exception) -> None:
        """Say it once, loudly, and stay out of the way from now on."""
        self.armed = False
        message = f"stepguard disarmed itself after a fault of its own: {type(fault).__name__}: {fault}"
        try:
            self._on_fault(fault)
        except Exception as second:
            message += f" (and could not record it: {second})"
        warnings.warn(message, GuardDisarmed, stacklevel=3)


def spare(default: T, say: Callable[[str], None], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For what only explains: the function's result, or `default` and a loud word where it fails."""
    try:
        return function(*args, **kwargs)
    except Exception as fault:
        message = f"a bad step is not explained, by a fault of stepguard's own: {type(fault).__name__}: {fault}"
        say(message)
        warnings.warn(f"{message}. The run is still protected.", NotExplained, stacklevel=3)
        return default

"""The one place where stepguard's own faults end.

Only what makes the verdict itself impossible disarms the guard, with a warning, and the run goes
on. A fault in all else (a snapshot, a note, the explanation of a bad step) costs that part;
protection goes on.
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
    """A bad step was caught, and a fault of stepguard's own kept it from being explained. It still
    protects.
    """


class PartFailed(RuntimeWarning):
    """A part that the verdict does not need failed by a fault of stepguard's own. It still
    protects.
    """


class Shield:
    """Calls the guard's own code. Never wraps the user's: their exceptions pass through untouched."""

    def __init__(
        self, on_fault: Callable[[Exception], None], say: Callable[[str], None] | None = None
    ) -> None:
        self.armed = True
        self._on_fault = on_fault
        self._say = say or (lambda summary: None)
        self._said: set[str] = set()

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

    def spare(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """For what the verdict does not need: a fault costs this call only, said once for each such
        part.
        """
        return self.always(default, function, *args, **kwargs) if self.armed else default

    def always(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `spare`, and also when disarmed: what a step that was found bad before that must have
        put back.
        """
        try:
            return function(*args, **kwargs)
        except TrainingHalted:
            raise
        except Exception as fault:
            self._part_failed(getattr(function, "__qualname__", type(function).__name__), fault)
            return default

    def _part_failed(self, part: str, fault: Exception) -> None:
        if part in self._said:
            return
        self._said.add(part)
        message = (
            f"{part} failed by a fault of stepguard's own and is left out: "
            f"{type(fault).__name__}: {fault}"
        )
        with contextlib.suppress(Exception):
            self._say(message)
        quiet_warning(f"{message}. The run is still protected.", PartFailed)

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
        message = (
            f"stepguard disarmed itself after a fault of its own: {type(fault).__name__}: {fault}"
        )
        try:
            self._on_fault(fault)
        except Exception as second:
            message += f" (and could not record it: {second})"
        quiet_warning(message, GuardDisarmed)


def spare(
    default: T,
    say: Callable[[str], None],
    function: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """For what only explains: the function's result, or `default` and a loud word where it fails."""
    try:
        return function(*args, **kwargs)
    except Exception as fault:
        message = (
            f"a bad step is not explained, by a fault of stepguard's own: "
            f"{type(fault).__name__}: {fault}"
        )
        say(message)
        quiet_warning(f"{message}. The run is still protected.", NotExplained)
        return default


def quiet_warning(message: str, category: type[Warning]) -> None:
    """A warning that is never an exception: under `-W error` that would undo the veto of a bad
    step.
    """
    with contextlib.suppress(Warning):
        warnings.warn(message, category, stacklevel=4)

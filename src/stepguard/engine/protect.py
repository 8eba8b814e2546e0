"""Where stepguard's own faults end: `with protect.region:` and `with protect.part("snapshots"):`.

A region is guard code between two pieces of user code. What stands in it makes the verdict, so a
fault there disarms the guard, with a warning, and the run goes on as if bare. A part is what the
verdict does not need (a snapshot, a note, an explanation): a fault costs that part, told once, and
the run stays protected. User code stands outside of both: its exceptions pass through untouched.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from stepguard._errors import TrainingHalted

P = ParamSpec("P")
T = TypeVar("T")


class GuardDisarmed(RuntimeWarning):
    """stepguard met a fault of its own and no longer protects this run."""


class NotExplained(RuntimeWarning):
    """A bad step was caught, but a fault of stepguard's own kept it from being explained."""


class PartFailed(RuntimeWarning):
    """A part that the verdict does not need failed by a fault of stepguard's own."""


class Protection:
    """Ends the faults of one guard's code."""

    def __init__(
        self, on_disarm: Callable[[Exception], None], tell: Callable[[str], None] | None = None
    ) -> None:
        """`on_disarm` records the fault; `tell` gets one sentence for each part that failed."""
        self.armed = True
        self.region = Region(self)
        """A fault inside disarms the guard. Check `armed` first: a `with` cannot skip its body."""
        self._on_disarm = on_disarm
        self._tell = tell
        self._told: set[str] = set()

    def part(self, name: str) -> Part:
        """A fault inside costs what `name` says; the guard stays armed."""
        return Part(self, name)

    def disarm(self, fault: Exception) -> None:
        """Warn once and stay out of the way from now on."""
        self.armed = False
        message = f"stepguard disarmed itself after a fault of its own: {in_words(fault)}"
        try:
            self._on_disarm(fault)
        except Exception as second:
            message += f" (and could not record it: {second})"
        quiet_warning(message, GuardDisarmed)

    def part_failed(self, name: str, fault: Exception) -> None:
        """Tell that a part is left out, the first time it is."""
        if name in self._told:
            return
        self._told.add(name)
        message = f"{name}: left out after a fault of stepguard's own: {in_words(fault)}"
        if self._tell is not None:
            with contextlib.suppress(Exception):
                self._tell(message)
        quiet_warning(f"{message}. The run is still protected.", PartFailed)


class Region:
    """Guard code that makes the verdict. Reusable and reentrant: it holds no state of its own."""

    __slots__ = ("_protection",)

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(fault, Exception) or isinstance(fault, TrainingHalted):
            return False
        if self._protection.armed:
            self._protection.disarm(fault)
        return True


class Part:
    """Guard code that the verdict does not need."""

    __slots__ = ("_name", "_protection")

    def __init__(self, protection: Protection, name: str) -> None:
        self._protection = protection
        self._name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(fault, Exception) or isinstance(fault, TrainingHalted):
            return False
        self._protection.part_failed(self._name, fault)
        return True


def explain_or_warn(
    default: T,
    tell: Callable[[str], None],
    function: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call what only explains a bad step; where it fails, warn and return `default`."""
    try:
        return function(*args, **kwargs)
    except Exception as fault:
        warn_not_explained(tell, in_words(fault))
        return default


def warn_not_explained(tell: Callable[[str], None], fault: str) -> None:
    """Tell that a bad step is vetoed, but not explained."""
    message = f"a bad step is not explained, by a fault of stepguard's own: {fault}"
    tell(message)
    quiet_warning(f"{message}. The run is still protected.", NotExplained)


def quiet_warning(message: str, category: type[Warning]) -> None:
    """Warn without ever raising: under `-W error` a raised warning would undo a veto."""
    with contextlib.suppress(Warning):
        warnings.warn(message, category, stacklevel=4)


def in_words(fault: BaseException) -> str:
    """`ValueError: text`."""
    return f"{type(fault).__name__}: {fault}"

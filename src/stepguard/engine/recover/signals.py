"""SIGTERM and Ctrl+C: the step under way ends, a good state is saved, and then the signal has its
usual effect.

One handler serves every guard of the process; it only sets a mark, and each guard acts on it
between two of its steps. A second signal has its effect at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_TERMINATED = 128 + signal.SIGTERM

_listening: list[Signals] = []
_before: dict[int, Any] = {}


class Signals:
    """One guard's part. One of the duties between two steps."""

    def __init__(
        self, save: Callable[[int], None], close: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._save, self._close, self._say = save, close, say
        self.waiting: int | None = None
        """The signal that this guard has not acted upon yet."""

    def listen(self) -> None:
        """From now on; only the main thread may."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not _listening:
            _install()
        _listening.append(self)

    def stop_listening(self) -> None:
        if self in _listening:
            _listening.remove(self)
            if not _listening:
                _uninstall()

    def due(self) -> bool:
        return self.waiting is not None

    def do(self) -> None:
        """Save; the last guard to do so lets the signal have its effect."""
        number, self.waiting = self.waiting, None
        assert number is not None
        self._save(number)
        if any(other.waiting is not None for other in _listening):
            return
        before = _before.get(number, signal.SIG_DFL)
        for guard in list(_listening):
            guard._close()
        _usual_effect(number, before)

    def mark(self, number: int) -> None:
        self.waiting = number
        name = signal.Signals(number).name
        self._say(
            f"{name}: the state is saved when this step is over; a second {name} ends the process "
            f"at once"
        )


def _heard(number: int, frame: FrameType | None) -> None:
    if any(guard.waiting is not None for guard in _listening):
        _usual_effect(number, _before.get(number, signal.SIG_DFL), frame)
        return
    for guard in _listening:
        guard.mark(number)


def _usual_effect(number: int, before: Any, frame: FrameType | None = None) -> None:
    if callable(before):
        before(number, frame)  # for Ctrl+C that is Python's own, which raises KeyboardInterrupt
    elif number == signal.SIGTERM:
        raise SystemExit(EXIT_TERMINATED)


def _install() -> None:
    for number in SIGNALS:
        before = signal.getsignal(number)
        if before not in (signal.SIG_IGN, None):  # None: somebody outside of Python takes it
            _before[number] = before
            signal.signal(number, _heard)


def _uninstall() -> None:
    for number, before in _before.items():
        if signal.getsignal(number) is _heard:  # else somebody came after us and takes care of it
            signal.signal(number, before)
    _before.clear()

"""Save a good state at SIGTERM and Ctrl+C, after the step that is running; then let them act.

One handler serves every guard of the process; it only sets a mark, and each guard acts on it
between two of its steps; with several ranks all of them do before the same step, also those that
got no signal (ranks/hung.py). A second signal has its usual effect at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from stepguard.ranks.hung import AgreedStop

# --- End a process that a signal cannot end, because its main thread waits in a collective.


class StuckProcess:
    """Watches over signals while several ranks train. Made in the main thread."""

    def __init__(self, ends_process: Callable[[int], bool], grace: float) -> None:
        """`ends_process` tells whether this signal would end the process without a guard.

        `grace`: seconds in which the main thread has to come to act on a signal.
        """
        self._ends_process = ends_process
        self._grace = grace
        self._acted = threading.Event()
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if self._before != -1:
            # an event loop listens there; it is not to lose its signals
            signal.set_wakeup_fd(self._before)
        _watching.add(self._writes)
        self._thread = threading.Thread(
            target=self._watch, name="stepguard-stuck-process", daemon=True
        )
        self._thread.start()

    def acted(self) -> None:
        """The main thread has come to act on the signal: it is not stuck."""
        self._acted.set()

    def close(self) -> None:
        """Stop watching."""
        self._acted.set()
        with contextlib.suppress(ValueError):
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writes):
                signal.set_wakeup_fd(current)
        _watching.discard(self._writes)
        # the reader sees the end of the file
        os.close(self._writes)
        self._thread.join()
        os.close(self._reads)

    def _watch(self) -> None:
        while True:
            heard = os.read(self._reads, 1)
            if not heard:
                return
            if self._ends_process(heard[0]) and not self._acted.wait(self._grace):
                _die_of(heard[0])


def _die_of(number: int) -> None:
    """Let the signal have its default action. Only the main thread may ask Python for that."""
    with contextlib.suppress(Exception):
        default = ctypes.c_void_p(None)
        ctypes.pythonapi.PyOS_setsig.argtypes = [ctypes.c_int, ctypes.c_void_p]
        ctypes.pythonapi.PyOS_setsig.restype = ctypes.c_void_p
        ctypes.pythonapi.PyOS_setsig(number, default)
        os.kill(os.getpid(), number)
        # a signal to the own process may be delivered to another thread, a moment later
        threading.Event().wait(1.0)
    os._exit(128 + number)


_watching: set[int] = set()
"""Files that Python writes signals of this process to."""


def _forget_in_child() -> None:
    """A forked worker would write its own signals into its parent's file."""
    if _watching:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


# --- Save a good state at SIGTERM and Ctrl+C, after the step that is running; then let them act.


SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_TERMINATED = 128 + signal.SIGTERM
ECHO = 3.0
"""Seconds within which a second signal may be the first one again: Slurm and a terminal signal all
processes of a job, and torchrun passes on to its ranks what it gets itself."""

_listening: list[weakref.ref[Signals]] = []
"""Weak: a guard whose model and optimizer are gone has nothing left to save."""
_before: dict[int, Any] = {}
_heard: dict[int, float] = {}
"""When each signal came last."""
_stuck: list[StuckProcess] = []
"""At most one: with several ranks a process may wait for another where no handler is run."""


class Signals:
    """One guard's part. One of the duties between two steps."""

    def __init__(
        self,
        save: Callable[[int, bool], None],
        close: Callable[[], None],
        say: Callable[[str], None],
        stop: AgreedStop | None = None,
    ) -> None:
        """`save` takes the signal, and whether all ranks are at the same step.

        `stop`: where several ranks have to stop together.
        """
        self._save = save
        self._stop = stop
        self._agreed = stop is None
        self._close = close
        self._say = say
        self.waiting: int | None = None
        """The signal that this guard has not acted upon yet."""

    def listen(self, grace: float) -> None:
        """Install the handler, if this is the first guard."""
        # Python allows signal handlers in the main thread only
        if threading.current_thread() is not threading.main_thread():
            return
        if not _listening:
            for number in SIGNALS:
                before = signal.getsignal(number)
                # None: installed outside of Python, it cannot be put back; ours is still
                # there where the last guard was collected in another thread
                if before not in (signal.SIG_IGN, None, _handle):
                    _before[number] = before
                    signal.signal(number, _handle)
                elif before is signal.SIG_IGN:
                    name = signal.Signals(number).name
                    self._say(f"{name} was ignored when the program started, and stays so")
        if self._stop is not None and not _stuck:
            _stuck.append(StuckProcess(_ends_process, grace))
        _listening.append(weakref.ref(self, _left))

    def stop_listening(self) -> None:
        for reference in _listening:
            if reference() is self:
                _left(reference)
                return

    def due(self) -> bool:
        """Is this the moment to act upon a signal, of this rank or of another one?"""
        if self._stop is None or self._stop.lost:
            return self.waiting is not None
        told = self._stop.reached()
        if told is None and self.waiting is not None:
            self._stop.ask(self.waiting)
        if told is not None:
            self._agreed = True
            self.waiting = self.waiting or told
        return told is not None

    def do(self) -> None:
        """Save; the last guard to do so lets the signal have its effect."""
        number = self.waiting
        assert number is not None
        self.waiting = None
        for process in _stuck:
            process.acted()
        self._save(number, self._agreed)
        if any(other.waiting is not None for other in _alive()):
            return
        before = _before.get(number, signal.SIG_DFL)
        for guard in _alive():
            guard._close()
        _usual_effect(number, before)

    def mark(self, number: int) -> None:
        """Remember the signal until the step is over."""
        self.waiting = number
        name = signal.Signals(number).name
        second = f"a second {name} ends the process at once"
        when = "this step is over" if self._stop is None else "all ranks are at the same step"
        self._say(f"{name}: the state is saved when {when}; {second}")


def _alive() -> list[Signals]:
    return [guard for reference in _listening if (guard := reference()) is not None]


def _left(reference: weakref.ref[Signals]) -> None:
    """A guard no longer listens, or is gone; the collector may run in any thread."""
    if reference in _listening:
        _listening.remove(reference)
    if not _listening and threading.current_thread() is threading.main_thread():
        while _stuck:
            _stuck.pop().close()
        for number, before in _before.items():
            # another handler that was installed after this one is left alone
            if signal.getsignal(number) is _handle:
                signal.signal(number, before)
        _before.clear()
        _heard.clear()


def _handle(number: int, frame: FrameType | None) -> None:
    if _stuck and number in _heard and time.monotonic() - _heard[number] < ECHO:
        return
    _heard[number] = time.monotonic()
    if not _alive() or any(guard.waiting is not None for guard in _alive()):
        _usual_effect(number, _before.get(number, signal.SIG_DFL), frame)
        return
    for guard in _alive():
        guard.mark(number)


def _usual_effect(number: int, before: Any, frame: FrameType | None = None) -> None:
    if callable(before):
        # for Ctrl+C that is Python's own handler, which raises KeyboardInterrupt
        before(number, frame)
    elif number == signal.SIGTERM:
        raise SystemExit(EXIT_TERMINATED)


def _ends_process(number: int) -> bool:
    """Would the signal end this process at once if there were no guard?"""
    return number in _before and _before[number] is signal.SIG_DFL

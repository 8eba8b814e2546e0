"""End a process that a signal cannot end, because its main thread waits in a collective.

Python runs a signal handler only when its main thread is back in Python. A thread that waits inside
C++ for another rank never is, so a handler of ours would keep a process alive that the signal's
default action ends at once. Python's C handler writes the number to a file first (`set_wakeup_fd`),
and a thread reads it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable


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

"""Save a good state at SIGTERM and Ctrl+C, after the step that is running; then let them act.

One handler serves every guard of the process; it only sets a mark, and each guard acts on it
between two of its steps; with several ranks all of them do before the same step, also those that
got no signal (agreed_stop.py). A second signal has its usual effect at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from stepguard.engine.context import Context
from stepguard.locate.source import is_users
from stepguard.tensors.torch_private import default_store

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


# --- Name the rank that has not come, where a step of several ranks takes too long.


LOOKS = 4
"""Looks in the time after which a rank counts as hung."""
SILENT = 3
"""Looks without a word after which a process counts as dead or frozen."""
TELLERS = 2
"""Ranks that read the others' places: the first may be the one that hangs."""
MOST_NAMED = 8


class RankProgress(NamedTuple):
    """Where a rank was when it last wrote it down."""

    step: int
    marks: int
    """Backward passes and updates of this step that it had come to."""
    at: float
    """When, in seconds since the epoch."""
    line: str
    """The user's line that its loop was in."""


class HungRank:
    """Watches over one guard from a thread of its own."""

    def __init__(self, context: Context, after: float) -> None:
        # a thread that held the model would keep its process group alive past its end
        self._context = weakref.ref(context)
        self._name = f"stepguard/places/{context.agreement.name}"
        self._after = after
        self._loop = threading.get_ident()
        self._stop = threading.Event()
        self._last: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._told: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._watch, name="stepguard-hung-rank", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._after / LOOKS):
            context = self._context()
            if context is None:
                return
            # the store may be gone at the end of a run; nothing here is worth an error
            with contextlib.suppress(Exception):
                self.look(context)
            del context

    def look(self, context: Context) -> None:
        """Write down where this rank is; if it has not moved for too long, tell who is behind."""
        place = context.place
        if place != self._last:
            self._last = place
            self._since = time.monotonic()
        own = RankProgress(*place, time.time(), self._line())
        default_store().set(f"{self._name}/{context.agreement.world_rank}", json.dumps(own))
        waited = time.monotonic() - self._since
        if waited < self._after or self._told == place or context.agreement.rank >= TELLERS:
            return
        self._told = place
        store = default_store()
        places: dict[int, RankProgress] = {}
        for rank in context.agreement.members:
            key = f"{self._name}/{rank}"
            if store.check([key]):
                places[rank] = RankProgress(*json.loads(store.get(key)))
        words = behind(places, time.time() - SILENT * self._after / LOOKS)
        if words:
            context.outputs.note("hang", f"nothing has moved for {waited:.0f} s: {words}")

    def _line(self) -> str:
        """The innermost line of the user's that the loop is in."""
        frame: FrameType | None = sys._current_frames().get(self._loop)
        while frame is not None:
            file = frame.f_code.co_filename
            if is_users(file) and "site-packages" not in file:
                return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return ""


def behind(places: dict[int, RankProgress], heard_after: float) -> str:
    """Say which ranks are behind the others, and which have said nothing since `heard_after`."""
    furthest = max((place[:2] for place in places.values()), default=(0, 0))
    words: list[str] = []
    for rank, place in places.items():
        if place.at < heard_after:
            words.append(f"rank {rank} has said nothing since step {place.step}: dead or frozen")
        elif place[:2] < furthest:
            where = f", in {place.line}" if place.line else ""
            words.append(f"rank {rank} has not come as far as the others{where}")
    if len(words) > MOST_NAMED:
        words = [*words[:MOST_NAMED], f"and {len(words) - MOST_NAMED} ranks more"]
    return "; ".join(words)


HANGS_AFTER = 5
"""Times `Ranks.timeout` without progress."""


def watch_for_hung_rank(context: Context) -> None:
    """Start to watch, where there are several ranks."""
    if context.agreement.size > 1:
        after = HANGS_AFTER * context.config.ranks.timeout
        context.resources.callback(HungRank(context, after).close)


# --- At which step all ranks stop, for a signal that perhaps only one of them has got.


BETWEEN = 1.0
"""Seconds between two looks, about."""
MOST = 4096
"""Steps between two looks."""


class AgreedStop:
    """One guard's part of it. Everything is asked between two steps."""

    def __init__(
        self,
        context: Context,
        *,
        store: Callable[[], Any] = default_store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._store = store
        self._clock = clock
        self._name = f"{context.agreement.name}/stop"
        self._look = -1
        """The step before which this rank looks next."""
        self._number = 0
        """How many looks there were."""
        self._width = 1
        """Steps from that look to the one after."""
        self._looked: tuple[float, int] | None = None
        """When the last look was, and before which step."""
        self._stop: tuple[int, int] | None = None
        """The step to stop at, and the signal; known once this rank has asked for it or read it."""
        self.lost = False
        """The store cannot be reached: every rank acts for itself."""

    def ask(self, number: int) -> None:
        """This rank has got a signal: have all ranks stop at the next look that lies ahead."""
        if self._stop is None and not self.lost and self._look >= 0:
            ahead = self._look
            # not the very next step: a loop may show the end of its step to one rank only after
            # the gradients are reduced, and to another before
            if ahead < self._context.step + 2:
                ahead += self._width
            self._ask_store(lambda store: self._propose(store, ahead, number))

    def reached(self) -> int | None:
        """The signal to act upon before this very step; None to go on. Called before every step."""
        if self.lost:
            return None
        step = self._context.step
        if self._look < 0:
            self._ask_store(self._begin)
        elif step >= self._look:
            self._ask_store(self._read)
        if self._stop is None or step < self._stop[0]:
            return None
        return self._stop[1]

    def _propose(self, store: Any, step: int, number: int) -> None:
        said = store.compare_set(f"{self._name}/at", "", f"{step} {number}")
        self._stop = _pair(said)

    def _begin(self, store: Any) -> None:
        self._context.agreement.begin()
        self._look = self._context.step + 1
        self._publish(store)

    def _read(self, store: Any) -> None:
        """Look: is there a step to stop at, and when is the look after the next?"""
        if store.check([f"{self._name}/at"]):
            self._stop = _pair(store.get(f"{self._name}/at"))
        place = f"{self._name}/look/{self._number % 2}"
        at, width = _pair(store.get(place)) if store.check([place]) else (-1, 1)
        if at != self._look:
            # ranks that do not keep step with each other cannot agree on one
            self.lost = True
            return
        self._number += 1
        self._look = max(self._look, self._context.step) + self._width
        self._width = width
        self._publish(store)

    def _publish(self, store: Any) -> None:
        """As the first rank: say before the next look how far it is from there to the one after."""
        if self._context.agreement.rank == 0:
            place = f"{self._name}/look/{self._number % 2}"
            now = self._clock()
            step = self._context.step
            before = self._looked
            self._looked = (now, step)
            if before is None or step <= before[1]:
                wanted_width = 1
            else:
                seconds = (now - before[0]) / (step - before[1])
                wanted_width = min(MOST, max(1, int(BETWEEN / max(seconds, 1e-9))))
            store.set(place, f"{self._look} {wanted_width}")

    def _ask_store(self, question: Callable[[Any], None]) -> None:
        try:
            question(self._store())
        except Exception:
            # the group, or the process that holds the store, is gone
            self.lost = True


def _pair(said: bytes) -> tuple[int, int]:
    first, second = said.decode().split()
    return int(first), int(second)


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

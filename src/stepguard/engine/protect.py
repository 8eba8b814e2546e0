"""Where stepguard's own faults end: `with protect.region:` and `with protect.part("snapshots"):`.

A region is guard code between two pieces of user code. What stands in it makes the verdict, so a
fault there disarms the guard, with a warning, and the run continues unguarded. A part is what the
verdict does not need (a snapshot, a note, an explanation): a fault costs that part, reported once,
and the run stays protected. User code stands outside of both: its exceptions pass unchanged.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from stepguard._errors import TrainingHalted
from stepguard.journal import Journal
from stepguard.records import GuardConfig, Incident, Reading, Sink
from stepguard.records.probes import Look
from stepguard.report.sinks import LoggingSink
from stepguard.report.terminal import Terminal
from stepguard.state.batch import LossFn

# --- Where stepguard's own faults end: `with protect.region:` and `with
# protect.part("snapshots"):`.


P = ParamSpec("P")
T = TypeVar("T")


class GuardDisarmed(RuntimeWarning):
    """An internal fault of stepguard disarmed the guard, which no longer protects this run."""


class NotExplained(RuntimeWarning):
    """A bad step was caught, but an internal fault of stepguard kept it from being explained."""


class PartFailed(RuntimeWarning):
    """A part that the verdict does not need failed because of an internal fault of stepguard."""


class Protection:
    """Ends the faults of one guard's code."""

    def __init__(
        self, on_disarm: Callable[[Exception], None], tell: Callable[[str], None] | None = None
    ) -> None:
        """`on_disarm` records the fault; `tell` gets one sentence for each part that failed."""
        self.armed = True
        self.region = Shield(self)
        """A fault inside disarms the guard. Check `armed` first: a `with` cannot skip its body."""
        self._on_disarm = on_disarm
        self._tell = tell
        self._told: set[str] = set()

    def part(self, name: str) -> Shield:
        """A fault inside costs what `name` says; the guard stays armed."""
        return Shield(self, name)

    def failed(self, fault: Exception, part: str = "") -> None:
        """Called in an `except` clause around guard code that runs in every step, where a `with`
        costs more than the code in it: `part` was left out, or, without a name, the guard disarms.
        """
        if isinstance(fault, TrainingHalted):
            raise fault
        if part:
            self.part_failed(part, fault)
        elif self.armed:
            self.disarm(fault)

    def disarm(self, fault: Exception) -> None:
        """Warn once and stay out of the way from now on."""
        self.armed = False
        message = f"stepguard disarmed itself after an internal fault: {in_words(fault)}"
        try:
            self._on_disarm(fault)
        except Exception as second:
            message += f" (and could not record it: {second})"
        quiet_warning(message, GuardDisarmed)

    def part_failed(self, name: str, fault: Exception) -> None:
        """Report that a part is dropped, the first time it is."""
        if name in self._told:
            return
        self._told.add(name)
        message = f"{name}: switched off after an internal fault of stepguard: {in_words(fault)}"
        if self._tell is not None:
            with contextlib.suppress(Exception):
                self._tell(message)
        quiet_warning(f"{message}. The run is still protected.", PartFailed)


class Shield:
    """Guard code whose faults end here. Reusable and reentrant: it holds no state of its own."""

    __slots__ = ("_name", "_protection")

    def __init__(self, protection: Protection, name: str = "") -> None:
        """`name` of a part that the verdict does not need; empty for code that makes it."""
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
        self._protection.failed(fault, self._name)
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
    """Report that a bad step is vetoed, but not explained."""
    message = f"a bad step is not explained, because of an internal fault of stepguard: {fault}"
    tell(message)
    quiet_warning(f"{message}. The run is still protected.", NotExplained)


def quiet_warning(message: str, category: type[Warning]) -> None:
    """Warn without ever raising: under `-W error` a raised warning would undo a veto."""
    with contextlib.suppress(Warning):
        warnings.warn(message, category, stacklevel=4)


def in_words(fault: BaseException) -> str:
    """`ValueError: text`."""
    return f"{type(fault).__name__}: {fault}"


# --- Borrowing a script's model, optimizer and loss: the first guarded step is handed to someone
# else instead of run.


Taker = Callable[[Any, LossFn], bool]
"""Gets the guard's context and the loss function of the step; False leaves the step to the guard.
"""
_takers: list[Taker] = []


class StepTaken(BaseException):
    """Unwinds the user's script once its objects have been used; not an Exception, so no handler of
    theirs stops it.
    """


@contextmanager
def taking(taker: Taker) -> Iterator[None]:
    """While this is open, every `guard.step` is offered to `taker`; where it takes one, the script
    ends.
    """
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def borrowing() -> bool:
    """Is a script being run only for its objects? Then its guards write no files."""
    return bool(_takers)


def offer(context: Any, loss_fn: LossFn) -> None:
    """Called by every guard before its step; does nothing in an ordinary run."""
    if _takers and _takers[-1](context, loss_fn):
        raise StepTaken


# --- Pass a run's events on to every output: journal, readable log, terminal, logging, user's
# sinks.


RARELY = 64
"""While an output fails, at least every Nth write tries it again."""


class OutputLost(RuntimeWarning):
    """Journal, readable log or terminal cannot be written. The run is still protected."""


class SinkDropped(RuntimeWarning):
    """A sink of the user's failed and receives no more events of this run; the journal does."""


class Outputs:
    """The outputs of one guard, in the order in which they are called."""

    def __init__(self, present_step: Callable[[], int] = lambda: 0) -> None:
        self._present_step = present_step
        self._outputs: list[Output] = []
        self.journal: Journal | None = None

    def add_journal(self, journal: Journal) -> None:
        self.journal = journal
        self.add(journal, "journal", f"the journal {journal.path}")

    def add(self, sink: Sink, kind: str, name: str) -> None:
        """Call `sink` from now on; its own failures are notes of this kind, under this name."""
        self._outputs.append(Output(sink, name, partial(self.note, kind)))

    def add_user_sink(self, sink: Sink) -> None:
        self._outputs.append(UserOutput(sink, repr(sink), partial(self.note, "sink")))

    def step(self, reading: Reading, *, committed: bool) -> None:
        for output in self._outputs:
            if output.wants_steps:
                output.step(reading, committed)

    def incident(self, incident: Incident) -> None:
        self._tell(lambda sink: sink.incident(incident))

    def note(self, kind: str, text: str, *, step: int | None = None, **facts: Any) -> None:
        """Report to people and journal in one sentence; `facts` are for the journal and for sinks.

        `step` is the present one if not given. A long series of one kind is thinned out by the
        terminal, which knows what comes in series (see `report.terminal.THINNED_OUT`).
        """
        at = self._present_step() if step is None else step
        self.line("note", {"step": at, "kind": kind, "summary": text, **facts})

    def line(self, type_: str, fields: dict[str, Any]) -> None:
        """Write a journal line of another type: `rewind`, `fault`, `end`."""
        self._tell(lambda sink: sink.note(type_, fields))

    def look(self, look: Look) -> None:
        self._tell(lambda sink: sink.look(look))

    def halted(self, incident: Incident, exit_line: str) -> None:
        self._tell(lambda sink: sink.halted(incident, exit_line))

    def close(self) -> None:
        """Close every output, the journal last: it records what fails while the others close."""
        for output in reversed(tuple(self._outputs)):
            output.put(lambda sink: sink.close())
            if isinstance(output, UserOutput) or output.is_for(self.journal):
                # A sink may serve other guards as well, and is not to hear more of this one; the
                # folder of a closed journal may have another writer by now.
                self._outputs.remove(output)

    def _tell(self, event: Event) -> None:
        for output in self._outputs:
            output.put(event)


Event = Callable[[Sink], None]


class Output:
    """One sink, the name it has in messages, and what its failures have cost so far."""

    def __init__(self, sink: Sink, name: str, tell: Callable[[str], None]) -> None:
        self.name = name
        self._sink = sink
        self.wants_steps = getattr(sink.step, "__func__", None) is not Sink.step
        self._tell_all = tell
        self._lost = 0
        """Events lost since it last worked."""
        self._failures = 0
        """How often it has begun to fail."""
        self._telling = False

    def is_for(self, sink: Sink | None) -> bool:
        return self._sink is sink

    def put(self, event: Event) -> None:
        """Pass on an event. Never raises for the output's own failure."""
        if self._telling:
            # This is the note about its own failure, which may fail as well.
            with contextlib.suppress(Exception):
                event(self._sink)
            return
        try:
            event(self._sink)
        except Exception as fault:
            self._failed(fault)
            return
        lost = self._lost
        self._lost = 0
        if lost and self._worth_telling():
            self._tell(f"{self.name} can be written again; {lost} of its records are lost")

    def step(self, reading: Reading, committed: bool) -> None:
        """Pass on a step; while the output fails, the 1st, 2nd, 4th, 8th, ... and every 64th."""
        if self._lost and not _power_of_two(self._lost) and self._lost % RARELY:
            self._lost += 1
        elif self._lost:
            self.put(lambda sink: sink.step(reading, committed))
        else:
            try:
                self._sink.step(reading, committed)
            except Exception as fault:
                self._failed(fault)

    def _failed(self, fault: Exception) -> None:
        self._lost += 1
        if self._lost > 1:
            return
        self._failures += 1
        text = (
            f"{self.name} cannot be written: {type(fault).__name__}: {fault}. The run is "
            f"still protected"
        )
        if self._worth_telling():
            self._tell(text)
        if self._failures == 1:
            quiet_warning(f"stepguard: {text}.", OutputLost)

    def _worth_telling(self) -> bool:
        # A disk that is nearly full fails and works in turns.
        return _power_of_two(self._failures)

    def _tell(self, text: str) -> None:
        self._telling = True
        try:
            self._tell_all(text)
        finally:
            self._telling = False


class UserOutput(Output):
    """A sink of the user's: it is dropped at its first failure."""

    def _failed(self, fault: Exception) -> None:
        self._sink = Sink()
        text = (
            f"{self.name} failed and is dropped, training continues without it: "
            f"{type(fault).__name__}: {fault}"
        )
        self._tell(text)
        quiet_warning(f"stepguard: {text}", SinkDropped)


def add_people_outputs(
    outputs: Outputs, config: GuardConfig, rank: int, whose: Callable[[], str]
) -> None:
    """Add what people read while training runs, on rank 0, as `GuardConfig.terminal` says."""
    if rank != 0:
        return
    if config.terminal == "auto":
        terminal = Terminal(policy=config.policy, whose=whose)
        outputs.add(terminal, "terminal", "the terminal report")
    logs = LoggingSink(propagate=config.terminal == "logging", whose=whose)
    outputs.add(logs, "logging", "the logger stepguard")


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0

"""Print incidents while training runs: the first of a kind as a panel, then ever fewer lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.text import Text

from stepguard.records import Incident, Policy, Sink
from stepguard.report import phrases, screen
from stepguard.report.panel import next_commands, paint_incident
from stepguard.report.phrases import ACTION_WORDS, effect

THINNED_OUT = frozenset(
    {*phrases.VERDICT_TITLES, "tracing", "outlier", "parameters", "filtered", "adopted"}
)
"""Kinds of notes that may come with every step: the 1st, 2nd, 4th, 8th, ... are printed."""
RECORD = 2.0
"""Times the largest spike before it that a spike must be to be worth another line."""


class Terminal(Sink):
    """Prints to stderr. Never raises for a stream that is closed or gone."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        policy: Policy | None = None,
        whose: Callable[[], str] = str,
    ) -> None:
        """`whose` gives the name of the guard that prints, and nothing where it is the only one."""
        self._stream = stream
        self._whose = whose
        self._policy = policy
        self._kinds: Counter[tuple[str, ...]] = Counter()
        self._located: dict[str, tuple[str, ...]] = {}
        """Kind of verdict -> the kind of its last incident whose place is known."""
        self._panels: set[tuple[str, ...]] = set()
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._notes: Counter[str] = Counter()
        self._shown: set[str] = set()
        self._rising = -2
        """The last step of a rising loss."""
        self._largest = 0.0
        """Deviations of the largest spike."""

    def incident(self, incident: Incident) -> None:
        """Print the first of its kind as a panel, then the 2nd, 4th, 8th, ... as a line.

        What is done for the first time is printed, too: a rewind after many skips.
        """
        kind = self._kind(incident)
        decision = incident.decision
        answer = (*kind, decision.action if decision else "")
        self._kinds[kind] += 1
        self._answers[answer] += 1
        self._shown.add(incident.id)
        times = self._kinds[kind]
        exact = phrases.kind_of(incident)
        if times == 1 or (exact == kind and exact not in self._panels):
            self._panels.add(exact)
            self._paint(
                lambda console: paint_incident(
                    console,
                    incident,
                    policy=self._policy,
                    whose=self._whose(),
                    unicode=screen.takes_unicode(self._target),
                )
            )
            return
        if decision is not None and decision.action == "stop":
            return  # `halted` follows with the same reason
        again = self._answers[answer] > 1
        if again and not _power_of_two(times):
            return
        counted = f"{phrases.ordinal(times)} of this kind"
        if decision is not None:
            counted += f", {decision.consecutive} in a row"
        if _power_of_two(times) and times > 2:
            counted += f", next shown is the {phrases.ordinal(2 * times)}"
        self._line(phrases.incident_line(incident, counted, again=again), "bold red")

    def _kind(self, incident: Incident) -> tuple[str, ...]:
        """What it is counted as: one that could not be located is the last located one again.

        In a watched loop only some of the bad steps are traced.
        """
        exact = phrases.kind_of(incident)
        verdict, *place = exact[:-1]
        if not any(place):
            return self._located.get(verdict, exact)
        if verdict not in self._located:
            # those before it, which could not be located, were the same trouble
            for earlier in [kind for kind in self._kinds if kind[0] == verdict]:
                self._kinds[exact] += self._kinds.pop(earlier)
        self._located[verdict] = exact
        return exact

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Print one line; other lines of the journal than notes and faults are for programs."""
        if kind == "fault":
            self._line(phrases.disarmed(fields), "bold red")
        if kind != "note" or not self._is_news(fields):
            return
        what = str(fields.get("kind"))
        text = phrases.note_line(fields)
        self._notes[what] += 1
        times = self._notes[what]
        if what in THINNED_OUT and times > 1:
            if not _power_of_two(times):
                return
            following = phrases.ordinal(2 * times)
            text += f" ({phrases.ordinal(times)} of this kind, next shown is the {following})"
        self._line(text, "yellow")

    def _is_news(self, fields: Mapping[str, Any]) -> bool:
        """A rise that continues is one rise. A spike that is not the largest by far is a tail of
        the losses that is known by now, unless a row of the batch explains it.
        """
        if fields.get("kind") == "drift":
            step = int(fields.get("step") or 0)
            continues = step - self._rising == 1
            self._rising = step
            return not continues
        evidence = fields.get("evidence") or {}
        size = evidence.get("deviations")
        if fields.get("kind") == "spike" and size is not None and "outlier" not in evidence:
            if size < RECORD * self._largest:
                return False
            self._largest = size
        return True

    def halted(self, incident: Incident, exit_line: str) -> None:
        """Say why the run stops and where the weights are; the exit line is printed anyway."""
        if incident.id not in self._shown:
            self.incident(incident)
        said = [phrases.stopping(incident), effect(incident) or ACTION_WORDS["stop"].effect]
        report = [command for command in next_commands(incident) if " report " in command]
        said += [f"next: {command}" for command in report[:1]]
        self._line("; ".join(said), "bold red")

    @property
    def _target(self) -> TextIO:
        # Looked up at every use: notebooks, test runners and loggers replace sys.stderr.
        return sys.stderr if self._stream is None else self._stream

    def _line(self, text: str, style: str) -> None:
        whose = self._whose()
        speaker = f"stepguard ({whose}): " if whose else "stepguard: "
        line = Text.assemble((speaker, "bold"), (text, style))
        # Soft-wrapped: one line stays one line in a log, whatever the window's width.
        self._paint(lambda console: console.print(line, soft_wrap=True))

    def _paint(self, paint: screen.Paint) -> None:
        screen.put(screen.draw(self._target, paint), self._target)


def _power_of_two(times: int) -> bool:
    return times & (times - 1) == 0

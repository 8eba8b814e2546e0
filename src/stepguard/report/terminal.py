"""Print incidents while training runs: the first of a kind as a panel, then counted lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from stepguard.records import Incident, Policy, Sink
from stepguard.report import messages, phrases, screen
from stepguard.report.decision_words import ACTION_WORDS, effect
from stepguard.report.panel import next_commands, paint_incident

THINNED_OUT = frozenset({*phrases.VERDICT_TITLES, "tracing", "outlier", "parameters", "filtered"})
"""Kinds of notes that may come with every step: the 1st, 2nd, 4th, 8th, ... are printed."""


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
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._notes: Counter[str] = Counter()
        self._shown: set[str] = set()

    def incident(self, incident: Incident) -> None:
        """Print the first of its kind as a panel, every further one as a counted line."""
        kind = phrases.kind_of(incident)
        decision = incident.decision
        answer = (*kind, decision.action if decision else "")
        self._kinds[kind] += 1
        self._answers[answer] += 1
        self._shown.add(incident.id)
        times = self._kinds[kind]
        if times == 1:
            self._panel(incident)
            return
        counted = f"{phrases.ordinal(times)} of this kind"
        if decision is not None:
            counted += f", {decision.consecutive} in a row"
        again = self._answers[answer] > 1
        self._line(messages.incident_line(incident, counted, again=again), "bold red")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Print one line; other lines of the journal than notes and faults are for programs."""
        if kind == "fault":
            self._line(messages.disarmed(fields), "bold red")
        elif kind == "note":
            self._note(str(fields.get("kind")), messages.note_line(fields))

    def _note(self, kind: str, text: str) -> None:
        self._notes[kind] += 1
        times = self._notes[kind]
        if kind in THINNED_OUT and times > 1:
            power_of_two = times & (times - 1) == 0
            if not power_of_two:
                return
            this = phrases.ordinal(times)
            following = phrases.ordinal(2 * times)
            text += f" ({this} of this kind, next shown is the {following})"
        self._line(text, "yellow")

    def halted(self, incident: Incident, exit_line: str) -> None:
        """Say why the run stops and where the weights are; then the line for launch scripts."""
        try:
            self._halted(incident)
        finally:
            self._paint(lambda console: console.print(Text(exit_line), soft_wrap=True))

    def _halted(self, incident: Incident) -> None:
        if incident.id not in self._shown:
            self.incident(incident)
        self._line(messages.stopping(incident), "bold red")
        self._line(effect(incident) or ACTION_WORDS["stop"].effect, "")
        report = [command for command in next_commands(incident) if " report " in command]
        if report:
            self._line(f"next: {report[0]}", "")

    def _panel(self, incident: Incident) -> None:
        def paint(console: Console) -> None:
            paint_incident(
                console,
                incident,
                policy=self._policy,
                whose=self._whose(),
                unicode=screen.takes_unicode(self._target),
            )

        self._paint(paint)

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

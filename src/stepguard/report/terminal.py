"""What the guard says while training runs: a panel for the first incident of a kind, one counted
line for the rest.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.text import Text

from stepguard.records import Incident, Policy
from stepguard.report import phrases, screen
from stepguard.report.panel import next_commands, paint_incident

STOPPING = "Stopping training to prevent corruption"
SVG_WIDTH = 96


class Terminal:
    """Prints to stderr on rank 0 only. Never raises for a stream that is closed or gone."""

    def __init__(
        self,
        stream: TextIO | None = None,
        quiet: bool = False,
        rank: int = 0,
        *,
        policy: Policy | None = None,
    ) -> None:
        self._stream = stream
        self.whose: Callable[[], str] = str
        """Gives the name of the guard that speaks, and nothing where it is the only one."""
        self._silent = quiet or rank != 0
        self._policy = policy
        self._kinds: Counter[tuple[str, ...]] = Counter()
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._notes: Counter[str] = Counter()
        self._shown: set[str] = set()

    def incident(self, incident: Incident) -> None:
        """The first of its kind as a panel, every further one as a counted line."""
        kind = phrases.kind_of(incident)
        answer = (*kind, incident.decision.action if incident.decision else "")
        self._kinds[kind] += 1
        self._answers[answer] += 1
        self._shown.add(incident.id)
        if self._kinds[kind] == 1:
            known = partial(
                paint_incident, incident=incident, policy=self._policy, whose=self.whose()
            )
            self._paint(partial(known, unicode=self._unicode))
        else:
            self._line(
                _repeat(incident, self._kinds[kind], again=self._answers[answer] > 1), "bold red"
            )

    def note(self, verdict_summary: str, step: int, kind: str) -> None:
        """One line; of a kind that goes on, the 1st, 2nd, 4th, 8th, ... are printed."""
        self._notes[kind] += 1
        times = self._notes[kind]
        if times & (times - 1):
            return
        counted = (
            f" ({phrases.ordinal(times)} of this kind, next shown is the "
            f"{phrases.ordinal(2 * times)})"
        )
        self._line(f"step {step}: {verdict_summary}" + (counted if times > 1 else ""), "yellow")

    def line(self, text: str) -> None:
        """Something that is said every time: what became of a checkpoint, a signal, the loader."""
        self._line(text, "yellow")

    def fault(self, message: str) -> None:
        """The guard itself failed: training goes on without it."""
        self._line(
            f"ERROR: the guard failed and is disarmed; training goes on unguarded: {message}",
            "bold red",
        )

    def launcher_line(self, line: str) -> None:
        """One line for programs: as it is, on stderr."""
        self._paint(lambda console: console.print(Text(line), soft_wrap=True))

    def halted(self, incident: Incident) -> None:
        """The policy stopped the run."""
        if incident.id not in self._shown:
            self.incident(incident)
        reason = incident.decision.reason if incident.decision else ""
        self._line(
            f"{STOPPING} at step {incident.step}" + (f": {reason}" if reason else ""), "bold red"
        )
        self._line(phrases.effect(incident) or phrases.ACTION_EFFECT["stop"], "")
        report = [command for command in next_commands(incident) if " report " in command]
        if report:
            self._line(f"next: {report[0]}", "")

    @property
    def _unicode(self) -> bool:
        return screen.takes_unicode(self._target)

    @property
    def _target(self) -> TextIO:
        # looked up anew each time: notebooks, test runners and loggers replace sys.stderr
        return self._stream if self._stream is not None else sys.stderr

    def _line(self, text: str, style: str) -> None:
        whose = self.whose()
        speaker = f"stepguard ({whose}): " if whose else "stepguard: "
        # soft-wrapped: one line stays one line in a log, whatever the window's width
        self._paint(
            lambda console: console.print(
                Text.assemble((speaker, "bold"), (text, style)), soft_wrap=True
            )
        )

    def _paint(self, paint: Callable[[Console], None]) -> None:
        if not self._silent:
            screen.put(screen.draw(self._target, paint), self._target)


def _repeat(incident: Incident, times: int, *, again: bool) -> str:
    decision = incident.decision
    done = phrases.done(decision) if decision else "is bad"
    counted = f"{phrases.ordinal(times)} of this kind"
    if decision is not None:
        counted += f", {decision.consecutive} in a row"
    line = f"step {incident.step} {done}{' again' if again else ''} ({counted}): {_gist(incident)}"
    return line + (f"; {decision.reason}" if decision is not None and decision.reason else "")


def _gist(incident: Incident) -> str:
    parts = [incident.verdict.summary or phrases.verdict_title(incident.verdict.kind)]
    if incident.origin is not None:
        parts.append(phrases.place(incident.origin))
        parts.append(phrases.culprits(incident.origin))
    if incident.findings:
        parts.append(incident.findings[0].code)
    return "; ".join(part for part in parts if part)


def incident_svg(
    incident: Incident, *, policy: Policy | None = None, width: int = SVG_WIDTH
) -> str:
    """The panel as an SVG picture, for documents."""
    console = screen.paper(width=width, colour=True, record=True)
    paint_incident(console, incident, policy=policy)
    return console.export_svg(title="stepguard")

"""What people read while training runs: the panel of an incident, then ever fewer lines.

A panel has no lines at the sides, so that snippets and commands can be copied.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from textwrap import dedent
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from stepguard.records import Incident, Origin, Policy, Sink
from stepguard.records.incident import place_and_phase
from stepguard.report import phrases, screen
from stepguard.report.phrases import SAFETY_NOTES, effect, next_commands
from stepguard.report.screen import Unbroken

LABEL_WIDTH = 9
_NUMBERED = re.compile(r"^\W*(\d+)\s*[|:│]?\s?(.*)$")


def paint_incident(
    console: Console,
    incident: Incident,
    *,
    policy: Policy | None = None,
    unicode: bool = True,
    whose: str = "",
    leave_out: str = "-",
) -> None:
    """Print the panel without empty sections.

    `whose` names the guard if there are several; commands that begin with `leave_out` are not
    proposed.
    """
    line = "━" if unicode else "-"
    title = f"stepguard: step {incident.step}, {phrases.verdict_title(incident.verdict.kind)}"
    if whose:
        title += f" ({whose})"
    console.print(Rule(Text(title, style="bold red"), characters=line, style="red", align="left"))
    commands = [one for one in next_commands(incident) if not one.startswith(leave_out)]
    done: list[Text] = []
    if incident.decision is not None:
        means = effect(incident)
        said = (phrases.done(incident.decision), "bold")
        done.append(Text.assemble(said, f": {means}" if means else ""))
        done += map(Text, phrases.changes(incident.decision))
        done.append(Text(phrases.budget(incident.decision, policy), style="dim"))
    sections: dict[str, list[RenderableType]] = {
        "WHAT": _what(incident),
        "WHY": _why(incident),
        "FIX": _fix(incident),
        "WHERE": _where(incident.origin, unicode) if incident.origin is not None else [],
        "SAMPLE": _sample(incident),
        "DONE": list(map(Unbroken, done)),
        "NEXT": [Text(command, style="bold") for command in commands],
    }
    for label, parts in sections.items():
        name = f" {label}"
        for part in parts:
            if isinstance(part, Text):
                # Commands and snippets stay on one line each, so that they can be copied.
                whole = Text.assemble((f"{name:<{LABEL_WIDTH}}", "bold cyan"), part)
                console.print(whole, soft_wrap=True, overflow="ignore", crop=False)
            else:
                shown = screen.table([(name, part)], first="bold cyan", widths=(LABEL_WIDTH - 2,))
                console.print(shown)
            name = ""
    console.print(Rule(characters=line, style="red"))


def _what(incident: Incident) -> list[RenderableType]:
    reading = incident.reading
    named = {"loss": reading.loss, **reading.components}
    named |= {"grad norm": reading.grad_norm, "scale": reading.scale}
    shown = []
    for name, value in named.items():
        if value is not None:
            shown.append(f"{name} {phrases.number(value)}")
    if reading.lr:
        shown.append(f"lr {phrases.rates(reading.lr, reading.schedule)}")
    if reading.bad_ranks:
        shown.append(f"bad on rank {phrases.first_few(reading.bad_ranks)}")
    facts = [", ".join(shown)]
    if len(reading.bad_grads) > 1:
        facts.append(f"bad gradients: {phrases.first_few(reading.bad_grads, 4)}")
    summary = incident.verdict.summary or phrases.verdict_title(incident.verdict.kind)
    return [Unbroken(summary), *(Unbroken(fact, "dim") for fact in facts if fact)]


def _why(incident: Incident) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for finding in incident.findings[:1]:
        title = Text.assemble((f"{finding.code} ", "bold yellow"), f"{finding.title} ")
        lines.append(Unbroken(title.append(f"({finding.certainty})", style="dim")))
        lines += [Unbroken(f"- {sentence}") for sentence in finding.evidence[:4]]
    others = "; ".join(f"{other.code} {other.title}" for other in incident.findings[1:3])
    if others:
        lines.append(Unbroken(f"less likely: {others}", "dim"))
    return lines


def _fix(incident: Incident) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for number, remedy in enumerate(phrases.first_remedies(incident), start=1):
        note = (SAFETY_NOTES.get(remedy.safety, ""), "dim")
        lines.append(Unbroken(Text.assemble(f"{number}. {remedy.title}", note)))
        snippet = dedent(remedy.snippet).strip("\n")
        for code in highlighted(snippet) if snippet else ():
            lines.append(Text.assemble("    ", code))
        if remedy.tried:
            lines.append(Unbroken(remedy.tried, "green" if remedy.proven else "dim"))
    return lines


def _where(origin: Origin, unicode: bool) -> list[RenderableType]:
    lines: list[RenderableType] = [screen.Place(place_and_phase(origin), origin.source)]
    lines += [Padding(line, (0, 0, 0, 2)) for line in _source(origin, unicode)]
    rows = []
    for position, value in enumerate(origin.inputs[:4]):
        rows.append((value.called or f"input {position}", value))
    if origin.output is not None:
        rows.append(("output", origin.output))
    cells = []
    for name, value in rows:
        style = "yellow"
        if value.finite:
            style = ""
        cells.append((name, Unbroken(value.words, style)))
    if cells:
        lines.append(Padding(screen.table(cells, first="dim"), (0, 0, 0, 2)))
    evidence = origin.evidence
    replayed = ""
    if origin.reproduced:
        replayed = "the replay shows it again"
    elif origin.reproduced is not None:
        replayed = "the replay does not show it again"
        if evidence.departs is not None:
            replayed = "the replay is bad as well, but in another way"
        elif not evidence.moves and evidence.different_losses is None:
            replayed += ": transient"
    remarks = (replayed, *origin.remarks)
    return [*lines, *(Unbroken(sentence, "dim") for sentence in remarks if sentence)]


def _sample(incident: Incident) -> list[RenderableType]:
    """The guilty samples with their rows, and what the first one holds."""
    facts = [phrases.culprits_of(incident)]
    origin = incident.origin
    if facts[0] and origin is not None:
        which = f"sample {origin.samples[0]}: " if len(origin.samples) > 1 else ""
        facts.append(origin.content and which + origin.content)
        facts.append(origin.excerpt and f'its text: "{origin.excerpt}"')
    return [Unbroken(fact) for fact in facts if fact]


def _source(origin: Origin, unicode: bool) -> Iterator[Text]:
    """The source lines, highlighted, with a mark at the one that made the bad value."""
    numbers = []
    code = []
    for source in origin.context:
        match = _NUMBERED.match(source)
        numbers.append(match[1] if match else "")
        code.append(match[2] if match else source)
    # `file.py:88`, or `cell [3], line 5` in a notebook
    culprit = re.split(r"\D", origin.source or "")[-1]
    digits = max(map(len, numbers), default=0)
    bar = "│ " if unicode else "| "
    plain = dedent("\n".join(code))
    shift = len(max(code, default="", key=len)) - len(max(plain.split("\n"), key=len))
    for number, text in zip(numbers, highlighted(plain), strict=False):
        here = bool(number) and number == culprit
        mark = (f"  {number:>{digits}} ", "dim")
        if here:
            mark = (f"> {number:>{digits}} ", "bold red")
        line = Text.assemble(mark, (bar, "dim"), text, no_wrap=True)
        # Where the encoding has no ellipsis character, a long line is cut off without one.
        line.overflow = "ellipsis" if unicode else "crop"
        if here:
            line.stylize("bold")
        yield line
        if here and origin.statement is not None:
            # where in this line the operation begins and ends; nowhere if it is in another line
            statement = origin.statement
            whole = statement.text.encode()
            before = whole[: statement.start].decode(errors="replace")
            part = whole[statement.start : statement.end].decode(errors="replace")
            first = last = len(before.rpartition("\n")[2])
            if statement.line + before.count("\n") == int(number):
                last = first + len(part.partition("\n")[0])
            margin = (" " * (digits + 3) + bar + " " * (first - shift), "dim")
            yield Text.assemble(margin, ("^" * (last - first), "bold red"), no_wrap=True)


def highlighted(code: str) -> list[Text]:
    """Python lines in the terminal's own colours."""
    text = Syntax(code, "python", theme="ansi_dark").highlight(code)
    # rich ends what it highlights with a newline of its own.
    return list(text.split("\n", allow_blank=True))[: code.count("\n") + 1]


# --- What is printed of a run: the first of a kind as a panel, then ever fewer lines.


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
        self._panels: set[tuple[str, ...]] = set()
        """Kinds of incidents that had a panel, and kinds of verdicts."""
        self._counted: Counter[tuple[str, ...]] = Counter()
        """How often each kind of verdict came, each answer to it, and each kind of note."""
        self._shown: set[str] = set()
        self._rising = -2
        """The last step of a rising loss."""
        self._largest = 0.0
        """Deviations of the largest spike."""

    def incident(self, incident: Incident) -> None:
        """Print the first of its kind as a panel, then the 2nd, 4th, 8th, ... as a line.

        What is done for the first time is printed, too: a rewind after many skips.
        """
        decision = incident.decision
        action = decision.action if decision is not None else ""
        verdict = (incident.verdict.kind,)
        kind = phrases.kind_of(incident)
        self._shown.add(incident.id)
        self._counted[verdict] += 1
        self._counted[*verdict, action] += 1
        # In a watched loop only some of the bad steps are traced: one that could not be located is
        # the same trouble again.
        located = any(kind[1:-1])
        if verdict not in self._panels or (located and kind not in self._panels):
            self._panels |= {verdict, kind}
            paint = partial(
                paint_incident,
                incident=incident,
                policy=self._policy,
                whose=self._whose(),
                unicode=screen.takes_unicode(self._target),
            )
            self._paint(paint)
            return
        times = self._counted[verdict]
        again = self._counted[*verdict, action] > 1
        # Of a stop, `halted` follows with the same reason.
        if action == "stop" or (again and not _power_of_two(times)):
            return
        counted = f"{phrases.ordinal(times)} of this kind"
        if decision is not None:
            counted += f", {decision.consecutive} in a row"
        if _power_of_two(times) and times > 2:
            counted += f", next shown is the {phrases.ordinal(2 * times)}"
        self._line(phrases.incident_line(incident, counted, again=again), "bold red")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Print one line; other lines of the journal than notes and faults are for programs."""
        text = phrases.message(kind, fields)
        if kind == "fault":
            self._line(text, "bold red")
        # What Python shows as a warning is not printed twice.
        if kind != "note" or fields.get("warned"):
            return
        what = str(fields.get("kind"))
        evidence = fields.get("evidence") or {}
        if what == "drift":
            # A rise that continues is one rise.
            before = self._rising
            self._rising = int(fields.get("step") or 0)
            if self._rising - before == 1:
                return
        size = evidence.get("deviations")
        if what == "spike" and size is not None and "outlier" not in evidence:
            # One that is not the largest by far is a tail of the losses that is known by now,
            # unless a row of the batch explains it.
            if size < RECORD * self._largest:
                return
            self._largest = size
        self._counted["note", what] += 1
        times = self._counted["note", what]
        if what in THINNED_OUT and times > 1:
            if not _power_of_two(times):
                return
            following = phrases.ordinal(2 * times)
            text += f" ({phrases.ordinal(times)} of this kind, next shown is the {following})"
        self._line(text, "yellow")

    def halted(self, incident: Incident, exit_line: str) -> None:
        """Say why the run stops and where the weights are; the exit line is printed anyway."""
        if incident.id not in self._shown:
            self.incident(incident)
        words = [
            phrases.stopping(incident),
            effect(incident) or phrases.ACTION_WORDS["stop"].effect,
        ]
        report = [command for command in next_commands(incident) if " report " in command]
        words += [f"next: {command}" for command in report[:1]]
        self._line("; ".join(words), "bold red")

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

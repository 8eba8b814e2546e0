"""One incident as a panel: what, where, why, what was done, what to do, and the next command.

No lines at the sides, so that snippets and commands can be copied.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from textwrap import dedent

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from stepguard.records import Decision, Incident, Origin, Policy, Remedy
from stepguard.records.incident import place_and_phase
from stepguard.report import phrases
from stepguard.report.phrases import budget, done, effect
from stepguard.report.screen import Unbroken

LABEL_WIDTH = 7
MOST_EVIDENCE = 4
MOST_OPERANDS = 4
MOST_REMEDIES = 2
SAFETY_NOTES = {
    "safe": "",
    "changes-numbers": "changes values",
    "changes-training": "changes what is learned",
}
HAND_OVER = Remedy(
    title="Hand the loss to the guard: a bad step can then be run again, and is located at once",
    snippet="""
guard = stepguard.watch(model, optimizer)
loss = guard.loss(loss_fn, batch)  # in place of loss = loss_fn(batch)
""",
)
"""Where a watched loop computed the bad value outside the model."""
_NUMBERED = re.compile(r"^\W*(\d+)\s*[|:│]?\s?(.*)$")


def paint_incident(
    console: Console,
    incident: Incident,
    *,
    policy: Policy | None = None,
    unicode: bool = True,
    whose: str = "",
) -> None:
    """Print the panel without empty sections; `whose` names the guard if there are several."""
    line = "━" if unicode else "-"
    title = f"stepguard: step {incident.step}, {phrases.verdict_title(incident.verdict.kind)}"
    if whose:
        title += f" ({whose})"
    console.print(Rule(Text(title, style="bold red"), characters=line, style="red", align="left"))
    sections = {"WHAT": _what(incident)}
    if incident.origin is not None:
        sections["WHERE"] = _where(incident.origin, phrases.culprits_of(incident), unicode)
    if incident.findings:
        sections["WHY"] = _why(incident)
    if incident.decision is not None:
        sections["DONE"] = _done(incident, incident.decision, policy)
    for label, content in sections.items():
        console.print(_labelled(label, *content))
    for position, remedy in enumerate(_first_remedies(incident)):
        _paint_remedy(console, position, remedy)
    for row, command in enumerate(next_commands(incident)):
        label = "" if row else " NEXT"
        padded = f"{label:<{LABEL_WIDTH + 2}}"
        _print_unwrapped(console, Text.assemble((padded, "bold cyan"), (command, "bold")))
    console.print(Rule(characters=line, style="red"))


def _labelled(label: str, *content: RenderableType) -> RenderableType:
    body = Table.grid(padding=(0, 2, 0, 0), expand=True)
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(ratio=1)
    body.add_row(Text(f" {label}", style="bold cyan"), Group(*content))
    return body


def _print_unwrapped(console: Console, line: Text) -> None:
    """Commands and snippets stay on one line each, however long, so that they can be copied."""
    console.print(line, soft_wrap=True, overflow="ignore", crop=False)


def next_commands(incident: Incident) -> list[str]:
    """What to type next, most telling first; only what this incident has files for."""
    commands = []
    if incident.run and incident.capsule and incident.replayable:
        path = incident.capsule
        origin = incident.origin
        if origin is not None and origin.rank not in (None, incident.rank):
            # The capsule of this rank holds a step that was healthy here.
            suffix = f"-rank{origin.rank}" if origin.rank else ""
            path = f"incidents/{incident.id}{suffix}/capsule"
        capsule = shlex.quote(f"{incident.run}/{path}")
        if any(remedy.proven for remedy in _first_remedies(incident)):
            commands.append(f"stepguard fix {capsule}")
        commands.append(f"stepguard replay {capsule}")
    if incident.findings:
        commands.append(f"stepguard explain {incident.findings[0].code}")
    if incident.run:
        commands.append(f"stepguard report {shlex.quote(incident.run)}")
    return commands


def _what(incident: Incident) -> list[RenderableType]:
    reading = incident.reading
    named = {
        "loss": reading.loss,
        **reading.components,
        "grad norm": reading.grad_norm,
        "scale": reading.scale,
    }
    shown = []
    for name, value in named.items():
        if value is not None:
            shown.append(f"{name} {phrases.number(value)}")
    if reading.lr:
        shown.append(f"lr {phrases.rates(reading.lr, reading.schedule)}")
    if reading.bad_ranks:
        shown.append(f"bad on rank {phrases.first_few(reading.bad_ranks)}")
    lines: list[RenderableType] = [
        Unbroken(incident.verdict.summary or phrases.verdict_title(incident.verdict.kind))
    ]
    if shown:
        lines.append(Unbroken(", ".join(shown), "dim"))
    if len(reading.bad_grads) > 1:
        lines.append(Unbroken(f"bad gradients: {phrases.first_few(reading.bad_grads, 4)}", "dim"))
    return lines


def _where(origin: Origin, culprits: str, unicode: bool) -> list[RenderableType]:
    lines: list[RenderableType] = [Unbroken(place_and_phase(origin))]
    if origin.context:
        lines.append(Padding(Group(*_source(origin, unicode)), (0, 0, 0, 2)))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    values = []
    for position, value in enumerate(origin.inputs[:MOST_OPERANDS]):
        values.append((value.called or f"input {position}", value))
    if origin.output is not None:
        values.append(("output", origin.output))
    for name, value in values:
        table.add_row(name, Unbroken(phrases.operand(value), "" if value.finite else "yellow"))
    if values:
        lines.append(Padding(table, (0, 0, 0, 2)))
    if culprits:
        lines.append(Unbroken(culprits))
        if origin.content:
            lines.append(Unbroken(f"sample {origin.samples[0]}: {origin.content}"))
        if origin.excerpt:
            lines.append(Unbroken(f'its text: "{origin.excerpt}"'))
    for sentence in filter(None, (_replayed(origin), *origin.remarks)):
        lines.append(Unbroken(sentence, "dim"))
    return lines


def _replayed(origin: Origin) -> str:
    evidence = origin.evidence
    if origin.reproduced is None:
        return ""
    if origin.reproduced:
        return "the replay shows it again"
    if evidence.departs is not None:
        return "the replay is bad as well, but in another way"
    if evidence.moves or evidence.different_losses is not None:
        return "the replay does not show it again"
    return "the replay does not show it again: transient"


def _source(origin: Origin, unicode: bool) -> Iterator[Text]:
    """The source lines, highlighted, with a mark at the one that made the bad value."""
    numbers = []
    code = []
    for source in origin.context:
        number, plain = "", source
        match = _NUMBERED.match(source)
        if match:
            number, plain = match.groups()
        numbers.append(number)
        code.append(plain)
    # `file.py:88`, or `cell [3], line 5` in a notebook
    culprit = re.split(r"\D", origin.source or "")[-1]
    digits = max(map(len, numbers), default=0)
    bar = "│ " if unicode else "| "
    # Where the encoding has no ellipsis character, a long line is cut off without one.
    overflow: OverflowMethod = "ellipsis" if unicode else "crop"
    for number, text in zip(numbers, highlighted(dedent("\n".join(code))), strict=False):
        here = bool(number) and number == culprit
        mark = (f"  {number:>{digits}} ", "dim")
        if here:
            mark = (f"> {number:>{digits}} ", "bold red")
        line = Text.assemble(mark, (bar, "dim"), text, no_wrap=True, overflow=overflow)
        if here:
            line.stylize("bold")
        yield line


def _why(incident: Incident) -> list[RenderableType]:
    finding = incident.findings[0]
    title = Text.assemble((f"{finding.code} ", "bold yellow"), f"{finding.title} ")
    title.append(f"({finding.certainty})", style="dim")
    lines: list[RenderableType] = [Unbroken(title)]
    for sentence in finding.evidence[:MOST_EVIDENCE]:
        lines.append(Unbroken(f"- {sentence}"))
    others = "; ".join(f"{other.code} {other.title}" for other in incident.findings[1:3])
    if others:
        lines.append(Unbroken(f"less likely: {others}", "dim"))
    return lines


def _done(incident: Incident, decision: Decision, policy: Policy | None) -> list[RenderableType]:
    means = effect(incident)
    lines = [Text.assemble((done(decision), "bold"), f": {means}" if means else "")]
    if decision.reason:
        lines.append(Text(decision.reason))
    if decision.lr_factor is not None:
        lines.append(Text(f"every learning rate times {decision.lr_factor:g}"))
    if decision.new_scale is not None:
        lines.append(Text(f"loss scale is now {decision.new_scale:g}"))
    lines.append(Text(budget(decision, policy), style="dim"))
    return [Unbroken(line) for line in lines]


def _first_remedies(incident: Incident) -> tuple[Remedy, ...]:
    if not incident.findings:
        origin = incident.origin
        return (HAND_OVER,) if origin is not None and origin.evidence.loss_unseen else ()
    return incident.findings[0].remedies[:MOST_REMEDIES]


def _paint_remedy(console: Console, position: int, remedy: Remedy) -> None:
    title = Text(f"{position + 1}. {remedy.title}")
    note = SAFETY_NOTES.get(remedy.safety, "")
    if note:
        title.append(f" ({note})", style="dim")
    console.print(_labelled("" if position else "TO DO", Unbroken(title)))
    snippet = dedent(remedy.snippet).strip("\n")
    for line in highlighted(snippet) if snippet else ():
        _print_unwrapped(console, Text.assemble(" " * (LABEL_WIDTH + 6), line))
    if remedy.tried:
        console.print(_labelled("", Unbroken(remedy.tried, "green" if remedy.proven else "dim")))


def highlighted(code: str) -> list[Text]:
    """Python lines in the terminal's own colours."""
    text = Syntax(code, "python", theme="ansi_dark").highlight(code)
    # rich ends what it highlights with a newline of its own.
    return list(text.split("\n", allow_blank=True))[: code.count("\n") + 1]

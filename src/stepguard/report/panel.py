"""One incident as a panel: what, where, why, what was done, what to do, and the next command.

No lines at the sides, so that snippets and commands can be copied.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from textwrap import dedent

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from stepguard.records import Incident, Operand, Origin, Policy, Reading, Remedy
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

Section = tuple[str, RenderableType]


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
    console.print(_rows(_sections(incident, policy, unicode)))
    for position, remedy in enumerate(_first_remedies(incident)):
        _paint_remedy(console, position, remedy)
    for row, command in enumerate(next_commands(incident)):
        label = " NEXT" if row == 0 else ""
        padded = f"{label:<{LABEL_WIDTH + 2}}"
        _print_unwrapped(console, Text.assemble((padded, "bold cyan"), (command, "bold")))
    console.print(Rule(characters=line, style="red"))


def _rows(sections: Iterable[Section]) -> RenderableType:
    body = Table.grid(padding=(0, 2, 0, 0), expand=True)
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(ratio=1)
    for label, content in sections:
        body.add_row(Text(f" {label}", style="bold cyan"), content)
    return body


def _print_unwrapped(console: Console, line: Text) -> None:
    """Commands and snippets stay on one line each, however long, so that they can be copied."""
    console.print(line, soft_wrap=True, overflow="ignore", crop=False)


def next_commands(incident: Incident) -> list[str]:
    """What to type next, most telling first; only what this incident has files for."""
    commands = []
    if incident.run and incident.capsule and incident.replayable:
        capsule = f"{incident.run}/{_capsule_of_origin(incident)}"
        if any(remedy.proven for remedy in _first_remedies(incident)):
            commands.append(f"stepguard fix {shlex.quote(capsule)}")
        commands.append(f"stepguard replay {shlex.quote(capsule)}")
    if incident.findings:
        commands.append(f"stepguard explain {incident.findings[0].code}")
    if incident.run:
        commands.append(f"stepguard report {shlex.quote(incident.run)}")
    return commands


def _capsule_of_origin(incident: Incident) -> str:
    """The capsule of the rank to blame: this rank's own holds a step that was healthy here."""
    origin = incident.origin
    if origin is None or origin.rank in (None, incident.rank):
        return incident.capsule or ""
    suffix = f"-rank{origin.rank}" if origin.rank else ""
    return f"incidents/{incident.id}{suffix}/capsule"


def _sections(incident: Incident, policy: Policy | None, unicode: bool) -> Iterator[Section]:
    yield "WHAT", _what(incident)
    if incident.origin is not None:
        yield "WHERE", _where(incident.origin, phrases.culprits_of(incident), unicode)
    if incident.findings:
        yield "WHY", _why(incident)
    if incident.decision is not None:
        yield "DONE", _done(incident, policy)


def _what(incident: Incident) -> RenderableType:
    lines: list[RenderableType] = [
        Unbroken(incident.verdict.summary or phrases.verdict_title(incident.verdict.kind))
    ]
    numbers = _numbers(incident.reading)
    if numbers:
        lines.append(Unbroken(numbers, "dim"))
    if len(incident.reading.bad_grads) > 1:
        named = phrases.first_few(incident.reading.bad_grads, 4)
        lines.append(Unbroken(f"bad gradients: {named}", "dim"))
    return Group(*lines)


def _numbers(reading: Reading) -> str:
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
    return ", ".join(shown)


def _where(origin: Origin, culprits: str, unicode: bool) -> RenderableType:
    lines: list[RenderableType] = [Unbroken(place_and_phase(origin))]
    if origin.context:
        lines.append(Padding(_source(origin, unicode), (0, 0, 0, 2)))
    values = list(origin.inputs[:MOST_OPERANDS])
    if origin.output is not None:
        values.append(origin.output)
    if values:
        lines.append(Padding(_values(origin, values), (0, 0, 0, 2)))
    if culprits:
        lines.append(Unbroken(culprits))
        if origin.content:
            lines.append(Unbroken(f"sample {origin.samples[0]}: {origin.content}"))
        if origin.excerpt:
            lines.append(Unbroken(f'its text: "{origin.excerpt}"'))
    for sentence in _certainty(origin):
        lines.append(Unbroken(sentence, "dim"))
    return Group(*lines)


def _values(origin: Origin, values: list[Operand]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for position, value in enumerate(values):
        name = value.called or f"input {position}"
        if value is origin.output:
            name = "output"
        style = "" if value.finite else "yellow"
        table.add_row(name, Unbroken(phrases.operand(value), style))
    return table


def _certainty(origin: Origin) -> Iterator[str]:
    if origin.reproduced is True:
        yield "the replay shows it again"
    elif origin.reproduced is False:
        yield _not_again(origin)
    yield from origin.remarks


def _not_again(origin: Origin) -> str:
    evidence = origin.evidence
    if evidence.departs is not None:
        return "the replay is bad as well, but in another way"
    impure = evidence.moves or evidence.different_losses is not None
    return "the replay does not show it again" + ("" if impure else ": transient")


def _source(origin: Origin, unicode: bool) -> RenderableType:
    """The source lines, highlighted, with a mark at the one that made the bad value."""
    numbers = []
    code = []
    for line in origin.context:
        match = _NUMBERED.match(line)
        numbers.append(match[1] if match else "")
        code.append(match[2] if match else line)
    # `file.py:88`, or `cell [3], line 5` in a notebook
    culprit = re.split(r"\D", origin.source or "")[-1]
    digits = max(map(len, numbers), default=0)
    lines = []
    for number, text in zip(numbers, highlighted(dedent("\n".join(code))), strict=False):
        here = bool(number) and number == culprit
        lines.append(_source_line(f"{number:>{digits}}", text, here=here, unicode=unicode))
    return Group(*lines)


def _source_line(number: str, text: Text, *, here: bool, unicode: bool) -> Text:
    bar = "│" if unicode else "|"
    # Where the encoding has no ellipsis character, a long line is cut off without one.
    overflow: OverflowMethod = "ellipsis" if unicode else "crop"
    mark = Text(f"> {number} ", style="bold red") if here else Text(f"  {number} ", style="dim")
    line = Text.assemble(mark, (f"{bar} ", "dim"), text, no_wrap=True, overflow=overflow)
    if here:
        line.stylize("bold")
    return line


def _why(incident: Incident) -> RenderableType:
    finding = incident.findings[0]
    title = Text.assemble((f"{finding.code} ", "bold yellow"), f"{finding.title} ")
    title.append(f"({finding.certainty})", style="dim")
    lines = [Unbroken(title)]
    for sentence in finding.evidence[:MOST_EVIDENCE]:
        lines.append(Unbroken(f"- {sentence}"))
    others = [f"{other.code} {other.title}" for other in incident.findings[1:3]]
    if others:
        lines.append(Unbroken(f"less likely: {'; '.join(others)}", "dim"))
    return Group(*lines)


def _done(incident: Incident, policy: Policy | None) -> RenderableType:
    decision = incident.decision
    assert decision is not None
    means = effect(incident)
    after = f": {means}" if means else ""
    lines = [Unbroken(Text.assemble((done(decision), "bold"), after))]
    if decision.reason:
        lines.append(Unbroken(decision.reason))
    if decision.lr_factor is not None:
        lines.append(Unbroken(f"every learning rate times {decision.lr_factor:g}"))
    if decision.new_scale is not None:
        lines.append(Unbroken(f"loss scale is now {decision.new_scale:g}"))
    lines.append(Unbroken(budget(decision, policy), "dim"))
    return Group(*lines)


def _first_remedies(incident: Incident) -> tuple[Remedy, ...]:
    if not incident.findings:
        origin = incident.origin
        return (HAND_OVER,) if origin is not None and origin.evidence.loss_unseen else ()
    return incident.findings[0].remedies[:MOST_REMEDIES]


def _paint_remedy(console: Console, position: int, remedy: Remedy) -> None:
    note = SAFETY_NOTES.get(remedy.safety, "")
    title = Text(f"{position + 1}. {remedy.title}")
    if note:
        title.append(f" ({note})", style="dim")
    label = "TO DO" if position == 0 else ""
    console.print(_rows([(label, Unbroken(title))]))
    snippet = dedent(remedy.snippet).strip("\n")
    for line in highlighted(snippet) if snippet else ():
        _print_unwrapped(console, Text.assemble(" " * (LABEL_WIDTH + 6), line))
    if remedy.tried:
        style = "green" if remedy.proven else "dim"
        console.print(_rows([("", Unbroken(remedy.tried, style))]))


def highlighted(code: str) -> list[Text]:
    """Python lines in the terminal's own colours."""
    text = Syntax(code, "python", theme="ansi_dark").highlight(code)
    # rich ends what it highlights with a newline of its own.
    return list(text.split("\n", allow_blank=True))[: code.count("\n") + 1]

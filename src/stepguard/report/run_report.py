"""A run's summary for the terminal and as Markdown, with the same rows and words in both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepguard.records.codec import as_markdown, one_line
from stepguard.report import phrases, screen
from stepguard.report.screen import Unbroken, titled
from stepguard.report.summary import Event, IncidentGroup, RunSummary

# --- The rows of a run's summary in words.


Row = tuple[str, str]
STATES = {
    "running": "running",
    "closed": "ended",
    "error": "ended by an exception",
    "signal": "ended by a signal",
    "stopped": "stopped by its policy",
    "killed": "ended without a word",
}
MOST_EVENTS = 40
_VERSIONS = ("stepguard", "torch", "python")
_SHOWN = (
    *_VERSIONS,
    *("optimizer", "parameters", "lr", "rank", "world", "agreement", "versions", "time"),
    *("config", "settings", "attempt", "process", "name", "lane"),
)
"""Fields of the header that are shown in a sentence, or not at all."""


def heading(summary: RunSummary) -> list[Row]:
    """When, with what, on how many ranks, and which settings are not the default."""
    header = summary.header
    folder = []
    if summary.runs > 1:
        others = f"`--run 1` to `--run {summary.runs}` show each of them"
        folder.append(f"used for {summary.runs} runs, this is number {summary.run}; {others}")
    if summary.elsewhere:
        folder.append(f"other runs are in {phrases.first_few(summary.elsewhere, 4)}")
    versions = header.get("versions") or {
        name: header[name] for name in _VERSIONS if name in header
    }
    ranks = restarts = ""
    if header.get("world", 1) > 1:
        ranks = f"{header['world']}, this is rank {header.get('rank', 0)}"
    if summary.restarts:
        restarts = f"{summary.restarts}, all in this report"
    changed = summary.changed_settings.items()
    rows = [
        ("began", phrases.moment(header.get("time"))),
        ("folder", "; ".join(folder)),
        ("restarts", restarts),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("optimizer", "" if summary.optimizers else _optimizer(header)),
        ("ranks", ranks),
        ("settings", ", ".join(f"{name}={_plain(value)}" for name, value in changed)),
    ]
    rows += [(name, _plain(value)) for name, value in header.items() if name not in _SHOWN]
    return [row for row in rows if row[1]]


def _optimizer(header: Mapping[str, Any]) -> str:
    parts = [str(header.get("optimizer") or "")]
    if header.get("parameters"):
        parts.append(phrases.count(header["parameters"], "parameter"))
    if header.get("lr"):
        parts.append(f"lr {phrases.rates(header['lr'])}")
    return phrases.joined(parts)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return phrases.number(value) if isinstance(value, float) else str(value)


def counts(summary: RunSummary) -> list[Row]:
    """Steps, bad steps, losses, clipping; of several optimizers, a few words on each."""
    first, best, last = map(
        phrases.number, (summary.first_loss, summary.best_loss, summary.last_loss)
    )
    rows = []
    for lane in summary.optimizers:
        made = f"{lane.committed:,} of {lane.steps:,} steps made"
        parts = [_optimizer(lane.header), made, phrases.count(lane.incidents, "incident")]
        if lane.last_loss is not None:
            start, end = phrases.number(lane.first_loss), phrases.number(lane.last_loss)
            parts.append(f"loss {start} to {end}")
        rows.append((lane.name, f"{STATES[lane.state]}: {', '.join(parts)}"))
    if rows:
        return [*rows, ("incidents", f"{summary.incidents:,}")]
    steps = f"{summary.steps:,} seen, {summary.committed:,} committed"
    if summary.left:
        ways = []
        if summary.rewinds:
            ways.append(phrases.count(summary.rewinds, "rewind"))
        if summary.restarts:
            ways.append(phrases.count(summary.restarts, "restart"))
        why = " and ".join(ways) or "the run went back"
        steps += f" ({summary.left:,} of them no longer count: {why})"
    steps += f", {summary.skipped:,} skipped"
    if summary.calibrations:
        steps += f", {phrases.count(summary.calibrations, 'loss-scale calibration')}"
    rows = [("steps", steps), ("bad steps", "none")]
    if summary.first_bad is not None:
        rows[1] = (
            "bad steps",
            f"{summary.bad_steps:,}, first {summary.first_bad}, last {summary.last_bad}, "
            f"longest stretch {summary.longest_stretch:,} in a row",
        )
    if summary.first_loss is not None:
        rows.append(("loss", f"first {first}, best {best}, last {last}"))
    clip = summary.clip
    if clip is not None:
        text = f"{clip.clipped / clip.steps:.1%} of {phrases.count(clip.steps, 'step')} clipped"
        if clip.mean_factor is not None:
            text += f", on average to {clip.mean_factor:.2g} of their length"
        rows.append(("clipping", text))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step (median)"))
    return rows


def lead_up(summary: RunSummary, *, plain: bool = False) -> list[Row]:
    """Gradient norm, loss and what was followed, over the steps before the first incident."""
    rows = []
    for lane in summary.optimizers:
        rows += [(f"{lane.name} {name}", drawn) for name, drawn in lead_up(lane, plain=plain)]
    if rows:
        return rows
    series = {"grad norm": summary.norms_before, "loss": summary.losses_before}
    for name, values in {**series, **summary.followed_before}.items():
        if len(values) > 1:
            drawn = phrases.sparkline(values, plain=plain)
            ends = f"{phrases.number(values[0])} to {phrases.number(values[-1])}"
            rows.append((name, f"{drawn}  {ends} in {phrases.count(len(values), 'step')}"))
    return rows


def chains(summary: RunSummary) -> list[tuple[str, list[Event], int]]:
    """What led to what, for each optimizer: heading, first and last events, number between."""
    lanes = summary.optimizers or (summary,)
    found = []
    for lane in lanes:
        title = "what led to what"
        if len(lanes) > 1:
            title += f": {lane.name}"
        events = list(lane.timeline)
        between = max(len(events) - MOST_EVENTS, 0)
        if between:
            events[MOST_EVENTS // 2 : -MOST_EVENTS // 2] = []
        if events:
            found.append((title, events, between))
    return found


def kind_title(group: IncidentGroup) -> str:
    """What is wrong, and with which of several optimizers."""
    title = phrases.verdict_title(group.verdict)
    return f"{group.optimizer}: {title}" if group.optimizer else title


def details(group: IncidentGroup) -> tuple[str, str, str, list[str]]:
    """Of a kind of incident: what is wrong, its place and samples, its cause, what to type next."""
    commands = [name for name in group.commands if not name.startswith("stepguard report ")]
    where = phrases.joined([group.where, group.culprits])
    summary = group.summary or phrases.verdict_title(group.verdict)
    return summary, where, f"{group.code} {group.title}".strip(), commands


# --- For a terminal.


STYLES = {"info": "", "note": "yellow", "incident": "bold red", "good": "green"}


def render_terminal(
    summary: RunSummary, *, width: int = 100, colour: bool = False, unicode: bool = True
) -> str:
    """The whole screen as text."""
    console = screen.paper(width=width, colour=colour)
    paint_summary(console, summary, unicode=unicode)
    return screen.text_on(console)


def paint_summary(console: Console, summary: RunSummary, *, unicode: bool = True) -> None:
    """Print the summary; parts without data are left out."""

    def title(text: str) -> None:
        console.print(titled(text, width=console.width, unicode=unicode))

    title(f"stepguard report: {summary.journal}")
    console.print(_pairs([*heading(summary), *counts(summary)]))
    if summary.torn:
        lines = phrases.count(summary.torn, "line")
        torn = f" warning: {lines} of the journal could not be read: a crash while writing"
        console.print(Text(torn, style="bold yellow"))
    if summary.groups:
        title("incidents by kind")
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(" #", justify="right")
        table.add_column("kind")
        for name in ("first", "last", "count", "in a row"):
            table.add_column(name, justify="right", no_wrap=True)
        for position, group in enumerate(summary.groups, start=1):
            kind = Text(kind_title(group), style="bold red")
            numbers = (group.first_step, group.last_step, group.count, group.consecutive)
            table.add_row(f" {position}", kind, *map(str, numbers))
        console.print(table)
        for position, group in enumerate(summary.groups, start=1):
            _paint_details(console, position, group)
    led = lead_up(summary, plain=not unicode)
    if led:
        title("before the first incident")
        console.print(_pairs(led))
    for name, events, between in chains(summary):
        title(name)
        first, then = ("•", "↓") if unicode else ("*", "v")
        chain = Table.grid(padding=(0, 2, 0, 0))
        chain.add_column(no_wrap=True, style="dim")
        chain.add_column(no_wrap=True, style="dim")
        chain.add_column()
        for position, event in enumerate(events):
            if between and position == len(events) // 2:
                missing = f"{phrases.count(between, 'event')} left out"
                chain.add_row("", then, Text(missing, style="dim"))
            mark = then if position else first
            chain.add_row(f" {event.steps}", mark, Unbroken(event.text, STYLES[event.weight]))
        console.print(chain)


def _pairs(rows: Sequence[Row]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan", min_width=6)
    grid.add_column()
    for name, value in rows:
        grid.add_row(f" {name}", Unbroken(value))
    return grid


def _paint_details(console: Console, position: int, group: IncidentGroup) -> None:
    summary, where, cause, commands = details(group)
    console.print()
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(Text(f" {position}.", style="dim"), Unbroken(summary))
    console.print(line)
    if group.code and group.certainty:
        cause += f" ({group.certainty})"
    rows = [("where", where), ("cause", cause)]
    for sentence in group.evidence:
        rows.append(("", f"- {sentence}"))
    rows += [("done", group.done), ("lr", phrases.rates(group.lr, group.schedule))]
    console.print(Padding(_pairs([row for row in rows if row[1]]), (0, 0, 0, 3)))
    for command in commands:
        # Not in the table: a long path must stay on one line to be copied.
        console.print(Text.assemble(("    next   ", "cyan"), (command, "bold")), soft_wrap=True)


# --- As Markdown, to paste into an issue or a lab book.


_COLUMNS = (
    *("#", "kind", "first step", "last step", "count", "in a row"),
    *("where", "cause", "done", "lr"),
)


def render_markdown(summary: RunSummary) -> str:
    """The whole page."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: RunSummary) -> Iterator[str]:
    yield from (f"# stepguard report: {_code(summary.journal)}", "")
    yield from _markdown_table(("", ""), [*heading(summary), *counts(summary)])
    if summary.torn:
        yield ""
        yield f"> Warning: {phrases.count(summary.torn, 'line')} of the journal could not be read."
    groups = list(enumerate(summary.groups, start=1))
    if groups:
        yield from ("", "## Incidents by kind", "")
        rows = []
        for position, group in groups:
            _, where, cause, _ = details(group)
            numbers = (group.first_step, group.last_step, group.count, group.consecutive)
            rates = phrases.rates(group.lr, group.schedule)
            rows.append((position, kind_title(group), *numbers, where, cause, group.done, rates))
        yield from _markdown_table(_COLUMNS, rows)
    for position, group in groups:
        text, _, _, commands = details(group)
        yield from ("", f"{position}. {as_markdown(text)}")
        for sentence in group.evidence:
            yield f"   - {as_markdown(sentence)}"
        for command in commands:
            yield f"   - {_code(command)}"
    led = lead_up(summary)
    if led:
        yield from ("", "## Before the first incident", "", "```")
        for name, value in led:
            yield one_line(f"{name:<10} {value}").replace("`", "'")
        yield "```"
    for title, events, between in chains(summary):
        yield from ("", f"## {title[:1].upper()}{title[1:]}", "")
        for position, event in enumerate(events, start=1):
            if between and position == len(events) // 2 + 1:
                yield f"   ({phrases.count(between, 'event')} left out)"
            yield f"{position}. **{as_markdown(event.steps)}**: {as_markdown(event.text)}"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(as_markdown(str(value)) for value in row)} |"


def _code(text: object) -> str:
    inside = one_line(str(text)).replace("`", "'")
    return f"`{inside}`"

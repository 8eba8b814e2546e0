"""The rows of a run's summary in words, the same for the terminal and for Markdown."""

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
from stepguard.report.summary import ClipActivity, Event, IncidentGroup, RunSummary

# --- The rows of a run's summary in words, the same for the terminal and for Markdown.


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
_RUN_FACTS = ("optimizer", "parameters", "lr", "rank", "world", "agreement")
_TOLD = (
    *_VERSIONS,
    *_RUN_FACTS,
    "versions",
    "time",
    "config",
    "settings",
    "attempt",
    "process",
    "name",
    "lane",
)


def heading(summary: RunSummary) -> list[Row]:
    """When, with what, on how many ranks, and which settings are not the default."""
    header = summary.header
    rows = [
        ("began", phrases.moment(header.get("time"))),
        ("folder", _folder(summary)),
        ("restarts", _restarts(summary)),
        ("versions", _versions(header)),
        ("optimizer", "" if summary.optimizers else _optimizer(header)),
        ("ranks", _ranks(header)),
        ("settings", _settings(summary.changed_settings)),
    ]
    for name, value in header.items():
        if name not in _TOLD:
            rows.append((str(name), _plain(value)))
    return [row for row in rows if row[1]]


def _folder(summary: RunSummary) -> str:
    """Where a folder holds more than this run."""
    parts = []
    if summary.runs > 1:
        others = f"`--run 1` to `--run {summary.runs}` show each of them"
        parts.append(f"used for {summary.runs} runs, this is number {summary.run}; {others}")
    if summary.elsewhere:
        parts.append(f"other runs are in {phrases.first_few(summary.elsewhere, 4)}")
    return "; ".join(parts)


def _restarts(summary: RunSummary) -> str:
    if not summary.restarts:
        return ""
    return f"{summary.restarts}, all in this report"


def _versions(header: Mapping[str, Any]) -> str:
    versions = header.get("versions")
    if not versions:
        versions = {name: header[name] for name in _VERSIONS if name in header}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _ranks(header: Mapping[str, Any]) -> str:
    if header.get("world", 1) <= 1:
        return ""
    return f"{header['world']}, this is rank {header.get('rank', 0)}"


def _settings(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_plain(value)}" for name, value in changed.items())


def _optimizer(header: Mapping[str, Any]) -> str:
    parts = [str(header.get("optimizer") or "")]
    if header.get("parameters"):
        parts.append(phrases.count(header["parameters"], "parameter"))
    if header.get("lr"):
        parts.append(f"lr {phrases.rates(header['lr'])}")
    return phrases.joined(parts)


def counts(summary: RunSummary) -> list[Row]:
    """Steps, bad steps, losses, clipping; of several optimizers, a few words on each."""
    if summary.optimizers:
        return [*map(_lane, summary.optimizers), ("incidents", f"{summary.incidents:,}")]
    rows = [("steps", _steps(summary)), ("bad steps", _bad(summary))]
    if summary.first_loss is not None:
        first = phrases.number(summary.first_loss)
        best = phrases.number(summary.best_loss)
        last = phrases.number(summary.last_loss)
        rows.append(("loss", f"first {first}, best {best}, last {last}"))
    if summary.clip is not None:
        rows.append(("clipping", _clipping(summary.clip)))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step (median)"))
    return rows


def _lane(summary: RunSummary) -> Row:
    parts = [_optimizer(summary.header), f"{summary.committed:,} of {summary.steps:,} steps made"]
    parts.append(phrases.count(summary.incidents, "incident"))
    if summary.last_loss is not None:
        first, last = phrases.number(summary.first_loss), phrases.number(summary.last_loss)
        parts.append(f"loss {first} to {last}")
    return summary.name, f"{STATES[summary.state]}: {', '.join(parts)}"


def _clipping(clip: ClipActivity) -> str:
    share = clip.clipped / clip.steps
    text = f"{share:.1%} of {phrases.count(clip.steps, 'step')} clipped"
    if clip.mean_factor is not None:
        text += f", on average to {clip.mean_factor:.2g} of their length"
    return text


def _steps(summary: RunSummary) -> str:
    parts = [
        f"{summary.steps:,} seen",
        f"{summary.committed:,} committed",
        f"{summary.skipped:,} skipped",
    ]
    if summary.left:
        parts[1] += f" ({summary.left:,} of them no longer count: {_left_by(summary)})"
    if summary.calibrations:
        parts.append(phrases.count(summary.calibrations, "loss-scale calibration"))
    return ", ".join(parts)


def _left_by(summary: RunSummary) -> str:
    """Why steps no longer count."""
    ways = []
    if summary.rewinds:
        ways.append(phrases.count(summary.rewinds, "rewind"))
    if summary.restarts:
        ways.append(phrases.count(summary.restarts, "restart"))
    return " and ".join(ways) or "the run went back"


def _bad(summary: RunSummary) -> str:
    if summary.first_bad is None:
        return "none"
    return (
        f"{summary.bad_steps:,}, first {summary.first_bad}, last {summary.last_bad}, "
        f"longest stretch {summary.longest_stretch:,} in a row"
    )


def lead_up(summary: RunSummary, *, plain: bool = False) -> list[Row]:
    """Gradient norm, loss and what was followed, over the steps before the first incident."""
    series = {
        "grad norm": summary.norms_before,
        "loss": summary.losses_before,
        **summary.followed_before,
    }
    rows = []
    for lane in summary.optimizers:
        rows += [(f"{lane.name} {name}", drawn) for name, drawn in lead_up(lane, plain=plain)]
    for name, values in {} if rows else series.items():
        if len(values) > 1:
            rows.append((name, _spark(values, plain)))
    return rows


def chains(summary: RunSummary) -> list[tuple[str, tuple[Event, ...]]]:
    """What led to what, under a heading for each optimizer."""
    lanes = summary.optimizers or (summary,)
    title = "what led to what"
    named = [
        (f"{title}: {lane.name}" if len(lanes) > 1 else title, lane.timeline) for lane in lanes
    ]
    return [(heading, events) for heading, events in named if events]


def kind_title(group: IncidentGroup) -> str:
    """What is wrong, and with which of several optimizers."""
    title = phrases.verdict_title(group.verdict)
    return f"{group.optimizer}: {title}" if group.optimizer else title


def _spark(values: Sequence[float], plain: bool) -> str:
    drawn = phrases.sparkline(values, plain=plain)
    first = phrases.number(values[0])
    last = phrases.number(values[-1])
    return f"{drawn}  {first} to {last} in {phrases.count(len(values), 'step')}"


def where_and_who(group: IncidentGroup) -> str:
    """The place and the samples of a kind of incident."""
    return phrases.joined([group.where, group.culprits])


def further_commands(group: IncidentGroup) -> list[str]:
    """What to type next, without the command whose output this is."""
    return [command for command in group.commands if not command.startswith("stepguard report ")]


def shorten(events: Sequence[Event], most: int = MOST_EVENTS) -> tuple[Sequence[Event], int]:
    """The beginning and the end of a long chain, and how many events lie between."""
    if len(events) <= most:
        return events, 0
    half = most // 2
    return [*events[:half], *events[-half:]], len(events) - 2 * half


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    if isinstance(value, float):
        return phrases.number(value)
    return str(value)


# --- A run's summary for a terminal: counts, incidents by kind, what led to them, events.


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
    _title(console, f"stepguard report: {summary.journal}", unicode)
    console.print(_pairs([*heading(summary), *counts(summary)]))
    if summary.torn:
        torn = (
            f"{phrases.count(summary.torn, 'line')} of the journal could not be read: a crash "
            f"while writing"
        )
        console.print(Text(f" warning: {torn}", style="bold yellow"))
    if summary.groups:
        _title(console, "incidents by kind", unicode)
        console.print(_table(summary.groups))
        for position, group in enumerate(summary.groups, start=1):
            _details(console, position, group)
    led = lead_up(summary, plain=not unicode)
    if led:
        _title(console, "before the first incident", unicode)
        console.print(_pairs(led))
    for title, events in chains(summary):
        _title(console, title, unicode)
        console.print(_chain(events, unicode))


def _title(console: Console, text: str, unicode: bool) -> None:
    console.print(titled(text, width=console.width, unicode=unicode))


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan", min_width=6)
    grid.add_column()
    for name, value in rows:
        grid.add_row(f" {name}", Unbroken(value))
    return grid


def _table(groups: Sequence[IncidentGroup]) -> RenderableType:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(" #", justify="right")
    table.add_column("kind")
    for name in ("first", "last", "count", "in a row"):
        table.add_column(name, justify="right", no_wrap=True)
    for position, group in enumerate(groups, start=1):
        kind = Text(kind_title(group), style="bold red")
        numbers = (group.first_step, group.last_step, group.count, group.consecutive)
        table.add_row(f" {position}", kind, *map(str, numbers))
    return table


def _details(console: Console, position: int, group: IncidentGroup) -> None:
    console.print()
    title = Table.grid(padding=(0, 1, 0, 0))
    title.add_row(
        Text(f" {position}.", style="dim"),
        Unbroken(group.summary or phrases.verdict_title(group.verdict)),
    )
    console.print(title)
    rows = [("where", where_and_who(group)), ("cause", _cause(group))]
    for sentence in group.evidence:
        rows.append(("", f"- {sentence}"))
    rows += [("done", group.done), ("lr", phrases.rates(group.lr, group.schedule))]
    console.print(Padding(_pairs([row for row in rows if row[1]]), (0, 0, 0, 3)))
    for command in further_commands(group):
        # Not in the table: a long path must stay on one line to be copied.
        console.print(Text.assemble(("    next   ", "cyan"), (command, "bold")), soft_wrap=True)


def _cause(group: IncidentGroup) -> str:
    cause = f"{group.code} {group.title}".strip()
    if group.code and group.certainty:
        cause += f" ({group.certainty})"
    return cause


def _chain(events: Sequence[Event], unicode: bool) -> RenderableType:
    shown, left_out = shorten(events)
    first = "•" if unicode else "*"
    then = "↓" if unicode else "v"
    chain = Table.grid(padding=(0, 2, 0, 0))
    chain.add_column(no_wrap=True, style="dim")
    chain.add_column(no_wrap=True, style="dim")
    chain.add_column()
    for position, event in enumerate(shown):
        if left_out and position == len(shown) // 2:
            missing = f"{phrases.count(left_out, 'event')} left out"
            chain.add_row("", then, Text(missing, style="dim"))
        mark = then if position else first
        chain.add_row(f" {event.steps}", mark, Unbroken(event.text, STYLES[event.weight]))
    return chain


# --- A run's summary as Markdown, to paste into an issue or a lab book.


_COLUMNS = (
    "#",
    "kind",
    "first step",
    "last step",
    "count",
    "in a row",
    "where",
    "cause",
    "done",
    "lr",
)


def render_markdown(summary: RunSummary) -> str:
    """The whole page."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: RunSummary) -> Iterator[str]:
    yield from (f"# stepguard report: {_code(summary.journal)}", "")
    yield from _run_markdown_table(("", ""), [*heading(summary), *counts(summary)])
    if summary.torn:
        yield ""
        yield f"> Warning: {phrases.count(summary.torn, 'line')} of the journal could not be read."
    if summary.groups:
        yield from ("", "## Incidents by kind", "")
        rows = [_row(position, group) for position, group in enumerate(summary.groups, start=1)]
        yield from _run_markdown_table(_COLUMNS, rows)
        for position, group in enumerate(summary.groups, start=1):
            yield from _run_markdown_details(position, group)
    led = lead_up(summary)
    if led:
        yield from ("", "## Before the first incident", "", "```")
        for name, value in led:
            yield one_line(f"{name:<10} {value}").replace("`", "'")
        yield "```"
    for title, events in chains(summary):
        yield from ("", f"## {title[:1].upper()}{title[1:]}", "")
        yield from _run_markdown_chain(events)


def _run_markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(as_markdown(value) for value in row)} |"


def _row(position: int, group: IncidentGroup) -> tuple[str, ...]:
    return (
        str(position),
        kind_title(group),
        str(group.first_step),
        str(group.last_step),
        str(group.count),
        str(group.consecutive),
        where_and_who(group),
        f"{group.code} {group.title}".strip(),
        group.done,
        phrases.rates(group.lr, group.schedule),
    )


def _run_markdown_details(position: int, group: IncidentGroup) -> Iterator[str]:
    yield ""
    summary = group.summary or phrases.verdict_title(group.verdict)
    yield f"{position}. {as_markdown(summary)}"
    for sentence in group.evidence:
        yield f"   - {as_markdown(sentence)}"
    for command in further_commands(group):
        yield f"   - {_code(command)}"


def _code(text: object) -> str:
    inside = one_line(str(text)).replace("`", "'")
    return f"`{inside}`"


def _run_markdown_chain(chain: Sequence[Event]) -> Iterator[str]:
    events, left_out = shorten(chain)
    for position, event in enumerate(events, start=1):
        if left_out and position == len(events) // 2 + 1:
            yield f"   ({phrases.count(left_out, 'event')} left out)"
        yield f"{position}. **{as_markdown(event.steps)}**: {as_markdown(event.text)}"

"""A run for the terminal and as Markdown, two runs side by side, and one that is unfinished."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepguard.records.codec import as_markdown, one_line
from stepguard.report import phrases, screen
from stepguard.report.health import Concern, StageOutcome, Verdict
from stepguard.report.screen import Name, Unbroken, table, titled
from stepguard.report.story import Run
from stepguard.report.summary import Event, IncidentGroup, RunComparison, RunSummary

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
    if summary.optimizers:
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
    found = []
    for lane in summary.lanes:
        title = "what led to what"
        if summary.optimizers:
            title += f": {lane.name}"
        events = list(lane.timeline)
        between = max(len(events) - MOST_EVENTS, 0)
        if between:
            events[MOST_EVENTS // 2 : -MOST_EVENTS // 2] = []
        if events:
            found.append((title, events, between))
    return found


KINDS = ("#", "kind", "first", "last", "count", "in a row")
"""Columns of the table of incidents."""


def kinds(summary: RunSummary) -> list[tuple[str, ...]]:
    """The table of incidents: number, what is wrong and with which optimizer, when, how often."""
    rows = []
    for position, group in enumerate(summary.groups, start=1):
        title = phrases.verdict_title(group.verdict)
        if group.optimizer:
            title = f"{group.optimizer}: {title}"
        numbers = (group.first_step, group.last_step, group.count, group.consecutive)
        rows.append((str(position), title, *map(str, numbers)))
    return rows


def details(group: IncidentGroup) -> tuple[str, list[Row], list[str]]:
    """Describe a kind of incident: title; place, cause and answer; commands to type next."""
    cause = f"{group.code} {group.title}".strip()
    if group.code and group.certainty:
        cause += f" ({group.certainty})"
    rows = [("where", phrases.joined([group.where, group.culprits])), ("cause", cause)]
    rows += [("", f"- {sentence}") for sentence in group.evidence]
    rows += [("done", group.done), ("lr", phrases.rates(group.lr, group.schedule))]
    commands = [name for name in group.commands if not name.startswith("stepguard report ")]
    summary = group.summary or phrases.verdict_title(group.verdict)
    return summary, [row for row in rows if row[1]], commands


# --- For a terminal.


STYLES = {
    "info": "",
    "note": "yellow",
    "incident": "bold red",
    "good": "green",
    "waiting": "dim",
    "passed": "green",
    "failed": "bold red",
    "healthy": "bold green",
    "attention": "bold yellow",
    "unhealthy": "bold red",
    "stopped": "bold red",
}
"""Styles by state, for events, stages and verdicts."""


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
        rows: list[tuple[RenderableType, ...]] = []
        for place, kind, *numbers in kinds(summary):
            rows.append((f" {place}", Text(kind, style="bold red"), *numbers))
        headings = (f" {KINDS[0]}", *KINDS[1:])
        console.print(table(rows, headings, first="", numbers_from=2))
    for position, group in enumerate(summary.groups, start=1):
        text, facts, commands = details(group)
        console.print()
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(Text(f" {position}.", style="dim"), Unbroken(text))
        console.print(line)
        console.print(Padding(_pairs(facts), (0, 0, 0, 3)))
        for command in commands:
            # Not in the table: a long path must stay on one line to be copied.
            console.print(Text.assemble(("    next   ", "cyan"), (command, "bold")), soft_wrap=True)
    led = lead_up(summary, plain=not unicode)
    if led:
        title("before the first incident")
        console.print(_pairs(led))
    first, then = ("•", "↓") if unicode else ("*", "v")
    for name, events, between in chains(summary):
        title(name)
        links: list[tuple[RenderableType, ...]] = []
        for position, event in enumerate(events):
            if between and position == len(events) // 2:
                missing = Unbroken(f"{phrases.count(between, 'event')} omitted", "dim")
                links.append(("", Text(then, "dim"), missing))
            mark = Text(then if position else first, style="dim")
            links.append((f" {event.steps}", mark, Unbroken(event.text, STYLES[event.weight])))
        console.print(table(links, first="dim"))


def _pairs(rows: Sequence[Row]) -> Table:
    drawn = table([(f" {name}", Unbroken(value)) for name, value in rows])
    drawn.columns[0].min_width = 6
    return drawn


# --- As Markdown, to paste into an issue or a lab book.


def render_markdown(summary: RunSummary) -> str:
    """The whole page."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: RunSummary) -> Iterator[str]:
    yield from (f"# stepguard report: {_code(summary.journal)}", "")
    yield from _markdown_table(("", ""), [*heading(summary), *counts(summary)])
    if summary.torn:
        yield ""
        yield f"> Warning: {phrases.count(summary.torn, 'line')} of the journal could not be read."
    if summary.groups:
        yield from ("", "## Incidents by kind", "")
        yield from _markdown_table(KINDS, kinds(summary))
    for position, group in enumerate(summary.groups, start=1):
        text, facts, commands = details(group)
        yield from ("", f"{position}. {as_markdown(text)}")
        for name, fact in facts:
            words = f"{name}: {fact}".removeprefix(": - ")
            yield f"   - {as_markdown(words)}"
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
                yield f"   ({phrases.count(between, 'event')} omitted)"
            yield f"{position}. **{as_markdown(event.steps)}**: {as_markdown(event.text)}"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(as_markdown, row))} |"


def _code(text: object) -> str:
    inside = one_line(str(text)).replace("`", "'")
    return f"`{inside}`"


# --- The runs of a folder.


def render_list(
    rows: Sequence[Mapping[str, str]], *, width: int = 100, colour: bool = False
) -> str:
    """One line for each run."""
    console = screen.paper(width=width, colour=colour)
    cells: list[list[RenderableType]] = []
    for row in rows:
        name, *facts = row.values()
        cells.append([Name(name), *facts])
    console.print(table(cells, list(rows[0])))
    return screen.text_on(console)


# --- Two runs side by side.


def render_comparison(comparison: RunComparison, *, width: int = 100, colour: bool = False) -> str:
    """The table as text; what is better off is green."""
    console = screen.paper(width=width, colour=colour)
    # The folders of the runs; with what is above them where they have the same name.
    folders = []
    for journal in (comparison.first, comparison.second):
        path = journal.replace("\\", "/")
        folders.append(path.rpartition("/journal")[0] or path)
    short = [folder.rpartition("/")[2] for folder in folders]
    if short[0] != short[1]:
        folders = short
    drawn = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("", *folders):
        drawn.add_column(Name(heading))
    better = [row.better for row in comparison.rows]
    better += ["same"] * len(comparison.settings)
    for (aspect, first, second), best in zip(comparison.cells, better, strict=True):
        styles = {"first": "", "second": "", best: "green"}
        ours, theirs = Unbroken(first, styles["first"]), Unbroken(second, styles["second"])
        drawn.add_row(Unbroken(aspect, "cyan"), ours, theirs)
    console.print(drawn)
    return screen.text_on(console)


# --- One screen of an unfinished run: where it is, how it does, which stages it has passed.


SHOWN = 48
"""Steps drawn as bars."""
LAST_INCIDENTS = 3
CONCERN_STYLES = {"attention": "yellow", "unhealthy": "bold red"}


def _numbers(run: Run, summary: RunSummary) -> list[Row]:
    steps = run.steps
    seen = f"{summary.steps:,} seen, {summary.committed:,} committed, {summary.skipped:,} skipped"
    if summary.left:
        seen += f", {summary.left:,} left behind"
    rows = [("step", f"-  ({seen})")]
    if run.last_step is not None:
        rows = [("step", f"{run.last_step}  ({seen})")]
    for name in ("loss", "grad_norm"):
        series = steps.column(name)
        recent = series.values[series.rows >= len(steps) - SHOWN].tolist()
        if any(map(math.isfinite, recent)):
            bars = phrases.sparkline(recent)
            rows.append((name, f"{phrases.number(steps.last(name))}  {bars}"))
    if steps.last_rates:
        rows.append(("lr", phrases.rates(steps.last_rates)))
    if summary.seconds_per_step is not None:
        rows.append(("speed", f"{phrases.number(summary.seconds_per_step)} s a step"))
    return [*rows, ("incidents", str(summary.incidents))]


def screenful(
    run: Run,
    summary: RunSummary,
    outcomes: Sequence[StageOutcome],
    verdict: Verdict,
    found: Sequence[Concern] = (),
) -> RenderableType:
    """Everything, for a `rich.live.Live` or a plain print."""
    parts: list[RenderableType] = []
    for lane, of_lane in zip(run.lanes, summary.lanes, strict=True):
        if run.further:
            parts.append(Text(f" {lane.name}", style="bold"))
        parts.append(_pairs(_numbers(lane, of_lane)))
    cells = []
    for outcome in outcomes:
        state = Text(outcome.state, style=STYLES[outcome.state])
        value = phrases.number(outcome.value)
        cells.append((f" {outcome.stage}", outcome.condition, value, state))
    if cells:
        parts.append(table(cells, (" stage", "condition", "now", ""), first=""))
    parts += [Unbroken(f" {outcome.note}", "yellow") for outcome in outcomes if outcome.note]
    for lane in run.lanes:
        whose = f"{lane.name}, " if run.further else ""
        for one in lane.incidents[-LAST_INCIDENTS:]:
            incident = one.incident
            text = f" {whose}step {incident.step}: {incident.verdict.summary}"
            if incident.decision is not None:
                text += f", {phrases.done(incident.decision)}"
            parts.append(Unbroken(text, "red"))
    parts += [Unbroken(f" {concern.text}", CONCERN_STYLES[concern.weight]) for concern in found]
    parts.append(Text(f" {verdict}", style=STYLES[verdict]))
    return Group(*parts)

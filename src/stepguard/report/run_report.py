"""A run for the terminal and as Markdown, two runs side by side, and one that is unfinished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepguard.report import phrases, screen
from stepguard.report.health import Concern, StageOutcome, Verdict
from stepguard.report.screen import Name, Unbroken, table, titled
from stepguard.report.story import Run
from stepguard.report.summary import Event, RunComparison, RunSummary
from stepguard.report.terminal import paint_incident

# --- The rows of a run's summary in words.


Row = tuple[str, str]
STATES = {
    "running": "running",
    "closed": "ended",
    "error": "ended by an exception",
    "signal": "ended by a signal",
    "stopped": "stopped by its policy",
    "killed": "ended without an end record",
}
MOST_EVENTS = 40
MOST_PANELS = 10
"""Kinds of incidents that are shown whole."""
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
        for position, group in enumerate(summary.groups, start=1):
            kind = phrases.verdict_title(group.verdict)
            if group.optimizer:
                kind = f"{group.optimizer}: {kind}"
            numbers = (group.first_step, group.last_step, group.count, group.consecutive)
            rows.append((f" {position}", Text(kind, style="bold red"), *map(str, numbers)))
        headings = (" #", "kind", "first", "last", "count", "in a row")
        console.print(table(rows, headings, first="", numbers_from=2))
    for position, group in enumerate(summary.groups[:MOST_PANELS], start=1):
        console.print()
        console.print(Unbroken(f" {position}. {group.done}".rstrip()))
        paint_incident(
            console,
            group.incident,
            whose=group.optimizer,
            unicode=unicode,
            leave_out="stepguard report ",
        )
    if len(summary.groups) > MOST_PANELS:
        rest = phrases.count(len(summary.groups) - MOST_PANELS, "further kind")
        console.print(Text(f" {rest} without a panel; --html shows every incident", style="dim"))
    led = lead_up(summary, plain=not unicode)
    if led:
        title("before the first incident")
        console.print(_pairs(led))
    first, then = ("•", "↓") if unicode else ("*", "v")
    for name, events, between in chains(summary):
        title(name)
        links = []
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


def render_markdown(summary: RunSummary) -> str:
    """Spell the screen as Markdown in a code fence, to paste into an issue or a lab book."""
    text = render_terminal(summary).replace("```", "'''")
    return f"```text\n{text}```\n"


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
    for cells in comparison.cells:
        drawn.add_row(*map(Unbroken, cells))
    console.print(drawn)
    return screen.text_on(console)


# --- One screen of an unfinished run: where it is, how it does, which stages it has passed.


CONCERN_STYLES = {"attention": "yellow", "unhealthy": "bold red"}


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
        rows = [("step", "-" if lane.last_step is None else f"{lane.last_step}"), *counts(of_lane)]
        # The newest losses, as bars
        losses = lane.steps.column("loss").values[-48:].tolist()
        if losses:
            rows.append(("", phrases.sparkline(losses)))
        parts.append(_pairs(rows))
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
        for one in lane.incidents[-3:]:
            incident = one.incident
            text = f" {whose}step {incident.step}: {incident.verdict.summary}"
            if incident.decision is not None:
                text += f", {phrases.done(incident.decision)}"
            parts.append(Unbroken(text, "red"))
    parts += [Unbroken(f" {concern.text}", CONCERN_STYLES[concern.weight]) for concern in found]
    parts.append(Text(f" {verdict}", style=STYLES[verdict]))
    return Group(*parts)

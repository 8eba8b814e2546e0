"""Two runs side by side: what each did about bad steps, with the numbers of their journals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.table import Table

from stepguard.records.codec import dumps, to_jsonable
from stepguard.records.incident import Action
from stepguard.report import phrases, screen
from stepguard.report.screen import Name, Unbroken
from stepguard.report.story import Run
from stepguard.report.summary import RunSummary, summarize

Better = Literal["first", "second", "same", "unknown"]
TAIL = 0.1
"""Share of the committed steps whose loss stands for where a run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One aspect of both runs in words, and which of them is better off where that can be said."""

    aspect: str
    first: str
    second: str
    better: Better = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """What `stepguard compare` shows."""

    first: str
    second: str
    rows: tuple[Row, ...]
    settings: dict[str, tuple[Any, Any]]
    """Settings of the guard that differ: name -> value in the first run, value in the second."""


def compare(first: Run, second: Run) -> RunComparison:
    """Compare two runs. Pure: the same two stories give the same table."""
    summaries = (summarize(first), summarize(second))
    of_second = _aspects(second, summaries[1])
    rows = []
    for aspect, (words, number) in _aspects(first, summaries[0]).items():
        other_words, other = of_second[aspect]
        better: Better = "same" if words == other_words else "unknown"
        if number is not None and other is not None and number != other:
            better = "first" if number < other else "second"
        rows.append(Row(aspect=aspect, first=words, second=other_words, better=better))
    before = summaries[0].changed_settings
    after = summaries[1].changed_settings
    settings = {}
    for name in {**before, **after}:
        pair = (before.get(name), after.get(name))
        if name != "run_dir" and pair[0] != pair[1]:
            settings[name] = pair
    return RunComparison(
        first=summaries[0].journal,
        second=summaries[1].journal,
        rows=tuple(rows),
        settings=settings,
    )


def _aspects(run: Run, summary: RunSummary) -> dict[str, tuple[str, float | None]]:
    """Each aspect of a run in words, and as a number where the smaller one is better."""
    table = run.steps
    not_finite = np.zeros(len(table), np.bool_)
    for name in ("loss", "grad_norm"):
        series = table.column(name)
        not_finite[series.rows[~series.finite]] = True
    harmful = not_finite & table.committed
    bad = summary.bad_steps + int((harmful & (table.incident < 0)).sum())
    steps = f"{summary.committed:,} of {summary.steps:,} committed"
    if summary.left:
        steps += f", {summary.left:,} of them left behind"
    bad_words = f"{bad:,}"
    if summary.first_bad is not None:
        bad_words += f", first at step {summary.first_bad}"
    # An unguarded loop says `guarded: false` in its journal.
    judged = 0
    if run.header.get("guarded", True):
        judged = len(table.column("loss"))
    counts: Counter[Action] = Counter()
    for group in summary.groups:
        counts.update(group.actions)
    cause = clipping = "-"
    if summary.groups:
        worst = summary.groups[0]
        cause = phrases.joined([worst.where, f"{worst.code} {worst.title}".strip()])
    if summary.clip is not None:
        clipping = f"{summary.clip.clipped / summary.clip.steps:.0%} of the steps"
    losses = table.values("loss", table.counts)
    last = losses[-max(1, int(len(losses) * TAIL)) :]
    ended_at = None
    if len(last):
        ended_at = float(last.mean())
    return {
        "steps": (steps, None),
        "losses judged before the update": (f"{judged:,}", None),
        "bad steps": (bad_words, bad),
        "bad steps committed": (f"{int(harmful.sum()):,}", int(harmful.sum())),
        "what was done": (phrases.done_times(counts) or "-", None),
        "first origin and cause": (cause or "not located", None),
        "clipping": (clipping, None),
        "loss at the end": (phrases.number(ended_at), ended_at),
        "best loss": (phrases.number(summary.best_loss), summary.best_loss),
        "seconds a step": (phrases.number(summary.seconds_per_step), summary.seconds_per_step),
    }


def render_json(comparison: RunComparison) -> str:
    """One line of strict JSON."""
    return dumps(to_jsonable(comparison))


def render_terminal(comparison: RunComparison, *, width: int = 100, colour: bool = False) -> str:
    """The table as text; what is better off is green."""
    console = screen.paper(width=width, colour=colour)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    # The folders of the runs; with what is above them where they have the same name.
    folders = []
    for journal in (comparison.first, comparison.second):
        path = journal.replace("\\", "/")
        folders.append(path.rpartition("/journal")[0] or path)
    short = [folder.rpartition("/")[2] for folder in folders]
    if short[0] != short[1]:
        folders = short
    for heading in ("", *folders):
        table.add_column(Name(heading))
    for row in comparison.rows:
        styles = {"first": "", "second": "", row.better: "green"}
        first = Unbroken(row.first, styles["first"])
        table.add_row(Unbroken(row.aspect, "cyan"), first, Unbroken(row.second, styles["second"]))
    for name, pair in comparison.settings.items():
        values = ["default" if value is None else str(value) for value in pair]
        table.add_row(Unbroken(name, "cyan"), *map(Unbroken, values))
    console.print(table)
    return screen.text_on(console)

"""Two runs side by side: what each did about bad steps, with the numbers of their journals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from rich.table import Table

from stepguard.records.codec import dumps, to_jsonable
from stepguard.records.incident import Action
from stepguard.report import phrases, screen
from stepguard.report.phrases import done_times
from stepguard.report.screen import Name, Unbroken
from stepguard.report.story import Run, StepTable
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


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two runs."""

    run: Run
    summary: RunSummary

    @property
    def hurt(self) -> int:
        """Steps that were committed although their loss or gradient norm was not finite."""
        return int(_not_finite(self.run.steps)[self.run.steps.committed].sum())

    @property
    def checked(self) -> int:
        """Losses that a guard has read; an unguarded loop says `guarded: false` in its journal."""
        if self.run.header.get("guarded") is False:
            return 0
        return len(self.run.steps.column("loss"))

    @property
    def bad_steps(self) -> int:
        unknown = self.run.steps.committed & (self.run.steps.incident < 0)
        return self.summary.bad_steps + int(_not_finite(self.run.steps)[unknown].sum())

    @property
    def ended_at(self) -> float | None:
        losses = self.run.steps.values("loss", self.run.steps.counts)
        if not len(losses):
            return None
        return float(losses[-max(1, int(len(losses) * TAIL)) :].mean())


def compare(first: Run, second: Run) -> RunComparison:
    """Compare two runs. Pure: the same two stories give the same table."""
    sides = (_Side(first, summarize(first)), _Side(second, summarize(second)))

    def words(aspect: str, of: Callable[[_Side], str]) -> Row:
        a, b = map(of, sides)
        return Row(aspect=aspect, first=a, second=b, better="same" if a == b else "unknown")

    def fewer(
        aspect: str, of: Callable[[_Side], float | None], say: Callable[[_Side], str] | None = None
    ) -> Row:
        """The smaller number is the better one."""
        a, b = map(of, sides)
        if say is None:
            return Row(
                aspect=aspect,
                first=phrases.number(a),
                second=phrases.number(b),
                better=_smaller(a, b),
            )
        return replace(words(aspect, say), better=_smaller(a, b))

    rows = (
        words("steps", _steps),
        words("losses judged before the update", lambda side: f"{side.checked:,}"),
        fewer("bad steps", lambda side: side.bad_steps, _bad_steps),
        fewer("bad steps committed", lambda side: side.hurt, lambda side: f"{side.hurt:,}"),
        words("what was done", lambda side: _done(side.summary)),
        words("first origin and cause", lambda side: _cause(side.summary)),
        words("clipping", lambda side: _clipping(side.summary)),
        fewer("loss at the end", lambda side: side.ended_at),
        fewer("best loss", lambda side: side.summary.best_loss),
        fewer("seconds a step", lambda side: side.summary.seconds_per_step),
    )
    a, b = (side.summary for side in sides)
    settings = _differing(a.changed_settings, b.changed_settings)
    return RunComparison(first=a.journal, second=b.journal, rows=rows, settings=settings)


def _smaller(a: float | None, b: float | None) -> Better:
    if a is None or b is None:
        return "unknown"
    if a == b:
        return "same"
    return "first" if a < b else "second"


def render_json(comparison: RunComparison) -> str:
    """One line of strict JSON."""
    return dumps(to_jsonable(comparison))


def render_terminal(comparison: RunComparison, *, width: int = 100, colour: bool = False) -> str:
    """The table as text; what is better off is green."""
    console = screen.paper(width=width, colour=colour)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("", *_headings(comparison.first, comparison.second)):
        table.add_column(Name(heading))
    for row in comparison.rows:
        styles = {"first": "", "second": "", row.better: "green"}
        first = Unbroken(row.first, styles["first"])
        second = Unbroken(row.second, styles["second"])
        table.add_row(Unbroken(row.aspect, "cyan"), first, second)
    for name, (mine, other) in comparison.settings.items():
        table.add_row(Unbroken(name, "cyan"), Unbroken(_setting(mine)), Unbroken(_setting(other)))
    console.print(table)
    return screen.text_on(console)


def _steps(side: _Side) -> str:
    text = f"{side.summary.committed:,} of {side.summary.steps:,} committed"
    if side.summary.left:
        text += f", {side.summary.left:,} of them left behind"
    return text


def _bad_steps(side: _Side) -> str:
    text = f"{side.bad_steps:,}"
    if side.summary.first_bad is not None:
        text += f", first at step {side.summary.first_bad}"
    return text


def _done(summary: RunSummary) -> str:
    counts: Counter[Action] = Counter()
    for group in summary.groups:
        counts.update(group.actions)
    return done_times(counts) or "-"


def _cause(summary: RunSummary) -> str:
    if not summary.groups:
        return "-"
    first = summary.groups[0]
    named = [first.where, f"{first.code} {first.title}".strip()]
    return phrases.joined(named) or "not located"


def _clipping(summary: RunSummary) -> str:
    if summary.clip is None:
        return "-"
    return f"{summary.clip.clipped / summary.clip.steps:.0%} of the steps"


def _differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    differing = {}
    for name in {**first, **second}:
        pair = (first.get(name), second.get(name))
        if name != "run_dir" and pair[0] != pair[1]:
            differing[name] = pair
    return differing


def _setting(value: Any) -> str:
    return "default" if value is None else str(value)


def _headings(first: str, second: str) -> tuple[str, str]:
    """The folders of the runs; with what is above them where they have the same name."""
    if _short(first) == _short(second):
        return _folder(first), _folder(second)
    return _short(first), _short(second)


def _folder(journal: str) -> str:
    return journal.replace("\\", "/").rpartition("/journal")[0] or journal


def _short(journal: str) -> str:
    """The run's folder: the file in it is always called the same."""
    parts = journal.replace("\\", "/").split("/")
    if len(parts) > 1 and parts[-1].startswith("journal"):
        return parts[-2]
    return parts[-1]


def _not_finite(table: StepTable) -> np.ndarray[Any, np.dtype[np.bool_]]:
    bad = np.zeros(len(table), np.bool_)
    for name in ("loss", "grad_norm"):
        series = table.column(name)
        bad[series.rows[~series.finite]] = True
    return bad

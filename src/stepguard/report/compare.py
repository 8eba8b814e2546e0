"""Two runs side by side: what each did about bad steps, with the numbers of their journals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

from rich.table import Table

from stepguard.records.codec import dumps, to_jsonable
from stepguard.report import phrases, screen
from stepguard.report.summary import Record, RunSummary, summarize
from stepguard.report.unbroken import Name, Unbroken

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
class Comparison:
    """What `stepguard compare` shows."""

    first: str
    second: str
    rows: tuple[Row, ...]
    settings: dict[str, tuple[Any, Any]]
    """Settings of the guard that differ: name -> value in the first run, value in the second."""


@dataclass(frozen=True, slots=True)
class _Side:
    record: Record
    summary: RunSummary

    @property
    def hurt(self) -> int:
        """Steps that were committed although their loss or gradient norm was not finite."""
        return sum(line.get("committed", True) and _bad(line) for line in self.record.steps)

    @property
    def checked(self) -> int:
        """None in a record that an unguarded loop kept of itself (`guarded: false` in its first
        line).
        """
        if self.record.header.get("guarded") is False:
            return 0
        return sum("loss" in line for line in self.record.steps)

    @property
    def ended_at(self) -> float | None:
        losses = [
            line["loss"]
            for line in self.record.steps
            if line.get("committed", True) and _fine(line, "loss")
        ]
        tail = losses[-max(1, int(len(losses) * TAIL)) :]
        return sum(tail) / len(tail) if tail else None


def compare(first: Record, second: Record) -> Comparison:
    """Pure: the same two records give the same table."""
    a, b = _Side(first, summarize(first)), _Side(second, summarize(second))
    rows = (
        _words(
            "steps", [f"{s.summary.committed:,} of {s.summary.steps:,} committed" for s in (a, b)]
        ),
        _words("losses read before backward", [f"{s.checked:,}" for s in (a, b)]),
        _fewer(
            "bad steps",
            [s.summary.bad_steps + s.hurt for s in (a, b)],
            [_bad_steps(s) for s in (a, b)],
        ),
        _fewer("bad steps committed", [s.hurt for s in (a, b)], [f"{s.hurt:,}" for s in (a, b)]),
        _words("what was done", [_done(s.summary) for s in (a, b)]),
        _words("first origin and cause", [_cause(s.summary) for s in (a, b)]),
        _words("clipping", [_clipping(s.summary) for s in (a, b)]),
        _fewer(
            "loss at the end",
            [a.ended_at, b.ended_at],
            [phrases.number(s.ended_at) for s in (a, b)],
        ),
        _fewer("best loss", *_both([s.summary.best_loss for s in (a, b)])),
        _fewer("seconds a step", *_both([s.summary.seconds_per_step for s in (a, b)])),
    )
    settings = _differing(a.summary.changed_settings, b.summary.changed_settings)
    return Comparison(
        first=a.summary.journal, second=b.summary.journal, rows=rows, settings=settings
    )


def render_json(comparison: Comparison) -> str:
    """One line of strict JSON."""
    return dumps(to_jsonable(comparison))


def render_terminal(comparison: Comparison, *, width: int = 100, colour: bool = False) -> str:
    """The table as text; what is better off is green."""
    console = screen.paper(width=width, colour=colour)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("", *_headings(comparison.first, comparison.second)):
        table.add_column(Name(heading))
    for row in comparison.rows:
        marks = {"first": ("green", ""), "second": ("", "green")}.get(row.better, ("", ""))
        table.add_row(
            Unbroken(row.aspect, "cyan"),
            Unbroken(row.first, marks[0]),
            Unbroken(row.second, marks[1]),
        )
    for name, (mine, other) in comparison.settings.items():
        table.add_row(Unbroken(name, "cyan"), Unbroken(_setting(mine)), Unbroken(_setting(other)))
    console.print(table)
    assert isinstance(console.file, StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def _words(aspect: str, said: Sequence[str]) -> Row:
    return Row(
        aspect=aspect,
        first=said[0],
        second=said[1],
        better="same" if said[0] == said[1] else "unknown",
    )


def _fewer(aspect: str, values: Sequence[float | None], said: Sequence[str]) -> Row:
    """The smaller number is the better one."""
    a, b = values
    better: Better = "unknown"
    if a is not None and b is not None:
        better = "same" if a == b else "first" if a < b else "second"
    return Row(aspect=aspect, first=said[0], second=said[1], better=better)


def _both(values: Sequence[float | None]) -> tuple[Sequence[float | None], list[str]]:
    return values, [phrases.number(value) for value in values]


def _bad_steps(side: _Side) -> str:
    summary, number = side.summary, side.summary.bad_steps + side.hurt
    return (
        f"{number:,}, first at step {summary.first_bad}"
        if summary.first_bad is not None
        else f"{number:,}"
    )


def _done(summary: RunSummary) -> str:
    counts: dict[str, int] = {}
    for group in summary.groups:
        for action, times in group.actions.items():
            counts[action] = counts.get(action, 0) + times
    return (
        ", ".join(
            f"{phrases.ACTION_DONE.get(action, action)} {times}" for action, times in counts.items()
        )
        or "-"
    )


def _cause(summary: RunSummary) -> str:
    if not summary.groups:
        return "-"
    first = summary.groups[0]
    named = ", ".join(part for part in (first.where, f"{first.code} {first.title}".strip()) if part)
    return named or "not located"


def _clipping(summary: RunSummary) -> str:
    clip = summary.clip
    return "-" if clip is None else f"{clip.clipped / clip.steps:.0%} of the steps"


def _differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*first, *(name for name in second if name not in first)]
    pairs = {name: (first.get(name), second.get(name)) for name in names if name != "run_dir"}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _setting(value: Any) -> str:
    return "default" if value is None else str(value)


def _headings(first: str, second: str) -> tuple[str, str]:
    """The folders of the runs; with what is above them where they have the same name."""
    short = _short(first), _short(second)
    return short if short[0] != short[1] else (_folder(first), _folder(second))


def _folder(journal: str) -> str:
    return journal.replace("\\", "/").rpartition("/journal")[0] or journal


def _short(journal: str) -> str:
    """The run's folder: the file in it is always called the same."""
    parts = journal.replace("\\", "/").split("/")
    return parts[-2] if len(parts) > 1 and parts[-1].startswith("journal") else parts[-1]


def _bad(line: Any) -> bool:
    return any(name in line and not _fine(line, name) for name in ("loss", "grad_norm"))


def _fine(line: Any, name: str) -> bool:
    return phrases.finite(line.get(name))

"""What the plot of a run shows, free of any plotting library: both renderers draw this."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepguard.report.curves import Curve, Curves, Label, Points, Scale, decimate, gather, thin
from stepguard.report.story import Run

INK = "#1f2933"
GRID = "#e4e7eb"
BLUE = "#2563eb"
PALE_BLUE = "#93b4f5"
TEAL = "#0f766e"
PALE_TEAL = "#86bdb8"
AMBER = "#d97706"
RED = "#dc2626"
GREY = "#7b8794"
LOSS_SHARE = 0.68
"""Height of the loss panel; the gradient norm has the rest."""
MOST_SPANS = 300
NEAR = 0.012
"""Of the width of the plot: marks that are nearer than this cover each other."""

Symbol = Literal["triangle", "diamond", "circle", "square", "left", "cross"]
MARKS: dict[str, tuple[Symbol, str]] = {
    "update dropped": ("triangle", RED),
    "made without a part of the batch": ("square", AMBER),
    "let through": ("diamond", RED),
    "not finite": ("cross", RED),
    "rewound": ("left", BLUE),
    "started again": ("left", GREY),
    "loss-scale calibration": ("circle", GREY),
}
"""How each kind of mark looks: shapes differ, so that colours need not be told apart."""


@dataclass(frozen=True, slots=True)
class FigureLine:
    """One curve, with no more points than a screen can show."""

    name: str
    series: Points
    colour: str
    width: float
    left: bool = False
    """Steps that no longer count."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one vertical axis."""

    name: str
    scale: Scale
    lines: list[FigureLine]


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps that are marked along the upper edge: without a finite loss they have no height."""

    name: str
    steps: Sequence[int]
    symbol: Symbol
    colour: str
    row: int = 0
    """0 stands at the edge, the next ones above it: no kind of mark covers another."""


@dataclass(frozen=True, slots=True)
class RunFigure:
    """Everything that is drawn."""

    title: str
    panels: list[Panel]
    """The loss, and below it the gradient norm where there is one."""
    rate: FigureLine | None
    """The learning rate where it changes, over an axis of its own in the lowest panel."""
    marks: list[Marks]
    spans: list[tuple[int, int]]
    """First and last step of each stretch of dropped updates."""
    labels: list[Label]
    first_step: int
    last_step: int

    @property
    def middle(self) -> float:
        """Labels of later steps stand to the left of theirs."""
        return (self.first_step + self.last_step) / 2


def describe(run: Run, title: str) -> RunFigure:
    """Describe the plot of a run."""
    curves = gather(run)
    panels = [_panel("loss", curves.loss, BLUE, PALE_BLUE)]
    if curves.norm.points[0] or curves.norm.left:
        panels.append(_panel("gradient norm", curves.norm, TEAL, PALE_TEAL))
    return RunFigure(
        title=title or "training loss",
        panels=panels,
        rate=_rate(curves),
        marks=_marks(curves),
        spans=curves.vetoed[:MOST_SPANS],
        labels=curves.labels,
        first_step=curves.first_step,
        last_step=curves.last_step,
    )


def _panel(name: str, curve: Curve, colour: str, pale: str) -> Panel:
    lines = []
    if curve.smooth[0]:
        lines.append(FigureLine(name, decimate(curve.points), pale, 0.8))
        median = f"{name}, running median"
        lines.append(FigureLine(median, decimate(curve.smooth), colour, 1.8))
    elif curve.points[0]:
        lines.append(FigureLine(name, decimate(curve.points), colour, 1.1))
    for left in curve.left:
        lines.append(FigureLine(f"{name}, left behind", decimate(left), GREY, 0.9, left=True))
    return Panel(name, curve.scale, lines)


def _rate(curves: Curves) -> FigureLine | None:
    if len(set(curves.rate[1])) < 2:
        return None
    return FigureLine("learning rate", decimate(curves.rate), AMBER, 0.9)


def _marks(curves: Curves) -> list[Marks]:
    marks = []
    near = NEAR * (curves.last_step - curves.first_step)
    rows: list[list[int]] = []
    for name, steps in curves.marks.items():
        symbol, colour = MARKS[name]
        shown = thin(steps)
        row = _free_row(shown, rows, near)
        marks.append(Marks(f"{name} ({len(steps):,})", shown, symbol, colour, row))
    return marks


def _free_row(steps: Sequence[int], rows: list[list[int]], near: float) -> int:
    """The lowest row in which none of these steps is near another mark; they are entered there."""
    row = 0
    while row < len(rows) and _covers(steps, rows[row], near):
        row += 1
    if row == len(rows):
        rows.append([])
    rows[row] = sorted([*rows[row], *steps])
    return row


def _covers(steps: Sequence[int], taken: Sequence[int], near: float) -> bool:
    for step in steps:
        place = bisect_left(taken, step - near)
        if place < len(taken) and taken[place] <= step + near:
            return True
    return False


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_bytes(content)
    fresh.replace(path)

"""What the plot of a run shows, free of any plotting library: both renderers draw this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepguard.records import Incident
from stepguard.report.curves import Curves, Label, Scale, Series, decimate, gather, stretches, thin

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

Symbol = Literal["triangle", "diamond", "circle"]


@dataclass(frozen=True, slots=True)
class FigureLine:
    """One curve, with no more points than a screen can show."""

    name: str
    series: Series
    colour: str
    width: float


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


def describe(
    steps: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], title: str
) -> RunFigure:
    """Describe the plot of a run, from its step lines and incidents."""
    curves = gather(steps, incidents)
    panels = [_panel("loss", curves.loss, curves.smooth_loss, curves.loss_scale, BLUE, PALE_BLUE)]
    if curves.norm[0]:
        panels.append(
            _panel(
                "gradient norm",
                curves.norm,
                curves.smooth_norm,
                curves.norm_scale,
                TEAL,
                PALE_TEAL,
            )
        )
    return RunFigure(
        title=title or "training loss",
        panels=panels,
        rate=_rate(curves),
        marks=_marks(curves),
        spans=stretches(curves.vetoed)[:MOST_SPANS],
        labels=curves.labels,
        first_step=curves.first_step,
        last_step=curves.last_step,
    )


def _panel(
    name: str, series: Series, smooth: Series, scale: Scale, colour: str, pale: str
) -> Panel:
    if not series[0]:
        return Panel(name, scale, [])
    if not smooth[0]:
        return Panel(name, scale, [FigureLine(name, decimate(series), colour, 1.1)])
    raw = FigureLine(name, decimate(series), pale, 0.8)
    median = FigureLine(f"{name}, running median", decimate(smooth), colour, 1.8)
    return Panel(name, scale, [raw, median])


def _rate(curves: Curves) -> FigureLine | None:
    if len(set(curves.rate[1])) < 2:
        return None
    return FigureLine("learning rate", decimate(curves.rate), AMBER, 0.9)


def _marks(curves: Curves) -> list[Marks]:
    kinds: list[tuple[str, list[int], Symbol, str]] = [
        ("update dropped", curves.vetoed, "triangle", RED),
        ("let through", curves.let_through, "diamond", RED),
        ("loss-scale calibration", curves.calibrations, "circle", GREY),
    ]
    marks = []
    for name, steps, symbol, colour in kinds:
        if steps:
            marks.append(Marks(f"{name} ({len(steps):,})", thin(steps), symbol, colour))
    return marks


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_bytes(content)
    fresh.replace(path)

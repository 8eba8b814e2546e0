"""Draw a run, or the trials of `whatif`, as a PNG: matplotlib (extra `plot`), no display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from stepguard._errors import ConfigError
from stepguard.records.probes import WhatIf
from stepguard.report import phrases
from stepguard.report.story import Run, Series
from stepguard.report.summary import group_incidents, stretches

# --- What the plot of a run shows: the line that counts, what was left behind, and what to mark.


Scale = Literal["log", "symlog", "linear"]
Points = tuple[list[int], list[float]]
"""Steps, and a finite value for each."""
MOST_LABELS = 6
MOST_MARKS = 400
"""Marks drawn of a kind, and shaded stretches; the legend has the true number."""
SMOOTH_OVER = 25
"""At least this many values are one median; more in long runs."""
NEAR = 0.012
"""Of the width of the plot: marks that are nearer than this cover each other."""

INK = "#1f2933"
GRID = "#e4e7eb"
BLUE = "#2563eb"
PALE_BLUE = "#93b4f5"
TEAL = "#0f766e"
PALE_TEAL = "#86bdb8"
AMBER = "#d97706"
RED = "#dc2626"
GREY = "#7b8794"

MARKERS = {
    "update dropped": ("v", RED, RED),
    "made without a part of the batch": ("s", AMBER, "white"),
    "let through": ("D", RED, "white"),
    "not finite": ("X", RED, RED),
    "rewound": ("<", BLUE, BLUE),
    "started again": ("<", GREY, GREY),
    "loss-scale calibration": ("o", GREY, "white"),
}
"""Shape, edge and face of each kind of mark: shapes differ, so that nobody needs the colours."""


class FigureLine(NamedTuple):
    """One curve, with no more points than a screen can show."""

    series: Points
    colour: str
    width: float
    left: bool = False
    """Steps that no longer count."""


class Panel(NamedTuple):
    """Curves over one vertical axis."""

    name: str
    scale: Scale
    lines: list[FigureLine]


class Marks(NamedTuple):
    """Steps that are marked along the upper edge: without a finite loss they have no height."""

    kind: str
    total: int
    steps: Sequence[int]
    row: int
    """0 stands at the edge, the next ones above it: no kind of mark covers another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigure:
    """Everything that is drawn. Non-finite values are in no curve; their steps are marks."""

    title: str
    panels: list[Panel]
    """The loss, and below it the gradient norm where there is one."""
    rate: Points | None
    """The learning rate of the first group where it changes, over the right axis."""
    marks: list[Marks]
    spans: list[tuple[int, int]]
    """First and last step of each stretch of dropped updates on the line that counts."""
    labels: list[tuple[int, str]]
    """Step and text of each kind of incident."""
    first_step: int
    last_step: int


def describe(run: Run, title: str) -> RunFigure:
    """Describe the plot of a run."""
    table = run.steps
    first = last = 0
    if len(table):
        first, last = int(table.step.min()), int(table.step.max())
    panels = [_panel(run, "loss", "loss", BLUE, PALE_BLUE)]
    norm = _panel(run, "gradient norm", "grad_norm", TEAL, PALE_TEAL)
    if norm.lines:
        panels.append(norm)
    rate = _points(run, table.column("lr").where(table.kept))
    labels = []
    for group in group_incidents(run)[:MOST_LABELS]:
        text = f"{group.code or phrases.verdict_title(group.verdict)} at step {group.first_step}"
        if group.count > 1:
            text += f" (x{group.count})"
        labels.append((group.first_step, text))
    return RunFigure(
        title=title or "training loss",
        panels=panels,
        rate=decimate(rate) if len(set(rate[1])) > 1 else None,
        marks=_marks(run, NEAR * (last - first)),
        spans=stretches(table.step[table.dropped & table.kept].tolist())[:MOST_MARKS],
        labels=labels,
        first_step=first,
        last_step=last,
    )


def _panel(run: Run, name: str, column: str, colour: str, pale: str) -> Panel:
    table = run.steps
    series = table.column(column)
    points = _points(run, series.where(table.kept))
    steps, values = points
    lines = []
    # A running median, which a single spike cannot bend; short runs have none.
    window = min(max(SMOOTH_OVER, len(values) // 200), len(values) // 8)
    if window >= 3:
        half = window // 2
        # For long runs one median every few steps is as smooth and far cheaper.
        every = max(1, len(values) // 2000)
        windows = np.lib.stride_tricks.sliding_window_view(np.array(values), 2 * half + 1)[::every]
        smooth = steps[half : len(values) - half : every], np.median(windows, axis=1).tolist()
        lines = [FigureLine(decimate(points), pale, 0.8), FigureLine(decimate(smooth), colour, 1.8)]
    elif values:
        lines = [FigureLine(decimate(points), colour, 1.1)]
    for branch in run.branches:
        inside = np.zeros(len(table), np.bool_)
        inside[branch.rows] = True
        left = _points(run, series.where(inside & ~table.kept))
        if left[0]:
            lines.append(FigureLine(decimate(left), GREY, 0.9, left=True))
    return Panel(name, scale_for(values), lines)


def _points(run: Run, series: Series) -> Points:
    usable = series.finite
    return run.steps.step[series.rows[usable]].tolist(), series.values[usable].tolist()


def _marks(run: Run, near: float) -> list[Marks]:
    table = run.steps
    done: dict[str, list[int]] = {"partial": [], "let_through": []}
    for one in run.incidents:
        if one.done in done and one.row is not None:
            done[one.done].append(int(table.step[one.row]))
    # A non-finite loss that was committed without a word: a loop without a guard.
    unguarded = np.zeros(len(table), np.bool_)
    loss = table.column("loss")
    unguarded[loss.rows[~loss.finite]] = True
    unguarded &= table.committed & (table.incident < 0)
    found = {
        "update dropped": table.step[table.dropped].tolist(),
        "made without a part of the batch": done["partial"],
        "let through": done["let_through"],
        "not finite": table.step[unguarded].tolist(),
        "rewound": [left.came_from for left in run.goings_back if left.by == "rewind"],
        "started again": [left.to for left in run.goings_back if left.by == "restart"],
        "loss-scale calibration": table.step[table.calibration].tolist(),
    }
    marks = []
    rows: list[list[int]] = []
    for kind, steps in found.items():
        if not steps:
            continue
        shown = thin(steps)
        row = 0
        while row < len(rows) and np.abs(np.subtract.outer(rows[row], shown)).min() <= near:
            row += 1
        if row == len(rows):
            rows.append([])
        rows[row] += shown
        marks.append(Marks(kind, len(steps), shown, row))
    return marks


def scale_for(values: Sequence[float]) -> Scale:
    """Log where every value is above 0; where not, symlog if they span decades, else linear."""
    if not values:
        return "linear"
    if min(values) > 0:
        return "log"
    spans_decades = max(map(abs, values)) / symlog_threshold(values) > 100
    return "symlog" if spans_decades else "linear"


def symlog_threshold(values: Sequence[float]) -> float:
    """Below this size a symlog axis is linear: the median of the values that are not 0."""
    sizes = list(map(abs, filter(None, values)))
    return median(sizes) if sizes else 1.0


def thin(steps: Sequence[int], most: int = MOST_MARKS) -> Sequence[int]:
    """Evenly fewer marks, always with the first and the last."""
    if len(steps) <= most:
        return steps
    return [steps[round(place)] for place in np.linspace(0, len(steps) - 1, most)]


def decimate(points: Points, most: int = 4000) -> Points:
    """Keep at most `most` points: the lowest and highest of each stretch, so every spike."""
    steps, values = points
    if len(steps) <= most:
        return points
    kept: set[int] = set()
    start = 0
    for part in np.array_split(np.array(values), most // 2):
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
        start += len(part)
    chosen = sorted(kept)
    return [steps[place] for place in chosen], [values[place] for place in chosen]


# --- Draw it.


ROW_HEIGHT = 0.055
"""Of the upper panel, for one row of marks."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_bytes(content)
    fresh.replace(path)


def _blank_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed: pip install 'stepguard[plot]'."
        ) from error
    # A Figure of its own, not pyplot: the user's backend and open figures stay as they are.
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


def write_png(shown: RunFigure, path: Path) -> None:
    """Write the picture. Raises ConfigError where matplotlib is not installed."""
    figure = _blank_figure(11, 6.2)
    heights = (0.68, 0.32)[: len(shown.panels)]
    rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    upper, lowest = rows[0][0], rows[-1][0]
    for panel, (axes,) in zip(shown.panels, rows, strict=True):
        _draw_panel(axes, panel, shown.spans)
    if shown.rate is not None:
        right = lowest.twinx()
        right.plot(*shown.rate, color=AMBER, linewidth=0.9)
        right.set_ylabel("learning rate", color=AMBER, fontsize=9)
        right.tick_params(colors=AMBER, labelsize=8)
        right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        right.spines[["top", "left", "bottom"]].set_visible(False)
    edge = upper.get_xaxis_transform()
    for marks in shown.marks:
        marker, colour, face = MARKERS[marks.kind]
        upper.scatter(
            marks.steps,
            [1.025 + ROW_HEIGHT * marks.row] * len(marks.steps),
            label=f"{marks.kind} ({marks.total:,})",
            marker=marker,
            s=42,
            edgecolors=colour,
            facecolors=face,
            transform=edge,
            clip_on=False,
        )
    if shown.marks:
        above = 1.06 + ROW_HEIGHT * max(marks.row for marks in shown.marks)
        corner = {"loc": "lower right", "bbox_to_anchor": (1.0, above), "ncols": 3}
        upper.legend(frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.0, **corner)
    for row, (step, text) in enumerate(shown.labels):
        side, away = "left", 8
        if step > (shown.first_step + shown.last_step) / 2:
            side, away = "right", -8
        upper.annotate(
            text,
            xy=(step, 1.0),
            xycoords=edge,
            xytext=(away, -12 - 15 * row),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=9,
            color=RED,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"},
        )
    upper.set_title(shown.title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=22)
    lowest.set_xlabel("optimizer step", color=INK)
    lowest.xaxis.get_major_locator().set_params(integer=True)
    margin = max(1.0, (shown.last_step - shown.first_step) * 0.015)
    lowest.set_xlim(shown.first_step - margin, shown.last_step + margin)
    _save(figure, path)


def _draw_panel(axes: Any, panel: Panel, spans: list[tuple[int, int]]) -> None:
    for line in panel.lines:
        dots = ":" if line.left else "-"
        axes.plot(*line.series, color=line.colour, linewidth=line.width, linestyle=dots)
    for first, last in spans:
        axes.axvspan(first - 0.5, last + 0.5, color=RED, alpha=0.08, linewidth=0.8, zorder=0)
    if not panel.lines:
        middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, f"no finite {panel.name}", color=GREY, **middle)
        axes.set_yticks([])
    elif panel.scale == "symlog":
        axes.set_yscale("symlog", linthresh=symlog_threshold(panel.lines[0].series[1]))
    elif panel.scale == "log":
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        # 0.5, 1, 2 instead of powers of ten, and more of them where there are few decades
        values = panel.lines[0].series[1]
        narrow = max(values) / min(values) < 100
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(panel.name, color=INK)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(which="both", colors=GREY, labelsize=9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_trials_png(found: WhatIf, path: Path) -> None:
    """Draw the losses of every trial. Raises ConfigError where matplotlib is not installed."""
    figure = _blank_figure(11, 5)
    axes: Any = figure.subplots()
    edge = axes.get_xaxis_transform()
    # Candidates that work have these colours, the best first; those that do not are red and dashed.
    colours = iter((BLUE, AMBER, PALE_BLUE, INK))
    sizes = []
    for outcome in found.outcomes:
        if not outcome.losses:
            continue
        colour, look = RED, {"linestyle": "--", "linewidth": 1.2}
        if outcome.works:
            colour, look["linestyle"] = next(colours, GREY), "-"
        if outcome is found.best:
            look["linewidth"] = 2.0
        steps = range(found.first, found.first + len(outcome.losses))
        axes.plot(steps, outcome.losses, color=colour, label=outcome.label, **look)
        bad = []
        for step, loss in zip(steps, outcome.losses, strict=True):
            if not math.isfinite(loss):
                bad.append(step)
            elif loss:
                sizes.append(abs(loss))
        axes.plot(bad, [0.98] * len(bad), "X", color=colour, transform=edge, clip_on=False)
    axes.axvline(found.step, color=GREY, linewidth=1, linestyle=":")
    if max(sizes, default=1.0) > 100 * min(sizes, default=1.0):
        axes.set_yscale("log")
    axes.set_title(f"what if: {found.incident}", loc="left", color=INK, fontweight="bold")
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    if found.outcomes:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    _save(figure, path)

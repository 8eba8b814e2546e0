"""The series behind a plot: the line that counts, what was left behind, and what to mark."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from stepguard._errors import ConfigError
from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.report import phrases
from stepguard.report.story import Bools, Run, Series, StepTable
from stepguard.report.summary import group_incidents

# --- The series behind a plot: the line that counts, what was left behind, and what to mark.


Scale = Literal["log", "symlog", "linear"]
Points = tuple[list[int], list[float]]
"""Steps, and a finite value for each."""
MOST_LABELS = 6
MOST_MARKS = 400
"""Marks drawn of a kind; the legend has the true number."""
SMOOTH_OVER = 25
"""At least this many values are one median; more in long runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What is written beside an incident."""

    step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity over the steps that count, and over those that do not."""

    points: Points
    smooth: Points
    scale: Scale
    left: list[Points] = field(default_factory=list)
    """Stretches that were left by a rewind or a restart, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Everything a plot shows. Non-finite values are in no curve; their steps are marks."""

    loss: Curve
    norm: Curve
    rate: Points
    """Learning rate of the first parameter group."""
    marks: dict[str, list[int]] = field(default_factory=dict)
    """Steps to mark, in the order of time, by what happened to them."""
    vetoed: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of each stretch without updates on the line that counts."""
    labels: list[Label] = field(default_factory=list)
    first_step: int = 0
    last_step: int = 0


def gather(run: Run) -> Curves:
    """The curves and marks of a run."""
    table = run.steps
    return Curves(
        loss=_curve(run, "loss"),
        norm=_curve(run, "grad_norm"),
        rate=_points(table, table.column("lr").where(table.kept)),
        marks=_marks(run),
        vetoed=stretches(table.step[table.dropped & table.kept].tolist()),
        labels=_labels(run),
        first_step=int(table.step.min()) if len(table) else 0,
        last_step=int(table.step.max()) if len(table) else 0,
    )


def _curve(run: Run, name: str) -> Curve:
    table = run.steps
    series = table.column(name)
    points = _points(table, series.where(table.kept))
    left = []
    for branch in run.branches:
        inside = np.zeros(len(table), np.bool_)
        inside[branch.rows] = True
        part = _points(table, series.where(inside & ~table.kept))
        if part[0]:
            left.append(part)
    return Curve(points=points, smooth=_smooth(points), scale=scale_for(points[1]), left=left)


def _points(table: StepTable, series: Series) -> Points:
    usable = series.finite
    return table.step[series.rows[usable]].tolist(), series.values[usable].tolist()


def _marks(run: Run) -> dict[str, list[int]]:
    table = run.steps
    rows_done: dict[str, list[int]] = {"partial": [], "let_through": []}
    for one in run.incidents:
        if one.done in rows_done and one.row is not None:
            rows_done[one.done].append(int(table.step[one.row]))
    found = {
        "update dropped": table.step[table.dropped].tolist(),
        "made without a part of the batch": rows_done["partial"],
        "let through": rows_done["let_through"],
        "not finite": table.step[_bad_and_committed(table)].tolist(),
        "rewound": [left.came_from for left in run.goings_back if left.by == "rewind"],
        "started again": [left.to for left in run.goings_back if left.by == "restart"],
        "loss-scale calibration": table.step[table.calibration].tolist(),
    }
    return {name: steps for name, steps in found.items() if steps}


def _bad_and_committed(table: StepTable) -> Bools:
    """Rows with a non-finite loss that were committed without a word: loops without a guard."""
    bad = np.zeros(len(table), np.bool_)
    loss = table.column("loss")
    bad[loss.rows[~loss.finite]] = True
    return bad & table.committed & (table.incident < 0)


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


def _smooth(points: Points) -> Points:
    """A running median, which a single spike cannot bend; empty for short runs."""
    steps, values = points
    window = min(max(SMOOTH_OVER, len(values) // 200), len(values) // 8)
    if window < 3:
        return [], []
    half = window // 2
    # For long runs one median every few steps is as smooth and far cheaper.
    every = max(1, len(values) // 2000)
    windows = np.lib.stride_tricks.sliding_window_view(np.array(values), 2 * half + 1)[::every]
    middles = steps[half : len(values) - half : every]
    return middles, np.median(windows, axis=1).tolist()


def stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Steps in their order as runs without a gap: first and last of each."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and 0 <= step - runs[-1][1] <= 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


def thin(steps: Sequence[int], most: int = MOST_MARKS) -> Sequence[int]:
    """Evenly fewer marks, always with the first and the last."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _labels(run: Run) -> list[Label]:
    labels = []
    for group in group_incidents(run)[:MOST_LABELS]:
        name = group.code or phrases.verdict_title(group.verdict)
        text = f"{name} at step {group.first_step}"
        if group.count > 1:
            text += f" (x{group.count})"
        labels.append(Label(step=group.first_step, text=text))
    return labels


def decimate(points: Points, most: int = 4000) -> Points:
    """Keep at most about `most` points: the lowest and highest of each stretch, so every spike."""
    steps, values = points
    if len(steps) <= most:
        return points
    stretch = -(-len(steps) // (most // 2))
    whole = len(values) - len(values) % stretch
    blocks = np.array(values[:whole]).reshape(-1, stretch)
    starts = np.arange(0, whole, stretch)
    kept = {*(starts + blocks.argmin(axis=1)).tolist(), *(starts + blocks.argmax(axis=1)).tolist()}
    rest = range(whole, len(values))
    if rest:
        kept |= {min(rest, key=values.__getitem__), max(rest, key=values.__getitem__)}
    chosen = sorted(kept)
    return [steps[i] for i in chosen], [values[i] for i in chosen]


# --- What the plot of a run shows, free of any plotting library: both renderers draw this.


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
        marks=_figure_marks(curves),
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


def _figure_marks(curves: Curves) -> list[Marks]:
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


# --- Draw the plot of a run as a PNG, with matplotlib (extra `plot`) and without a display.


MARKERS = {
    "triangle": "v",
    "diamond": "D",
    "circle": "o",
    "square": "s",
    "left": "<",
    "cross": "X",
}
FILLED = ("triangle", "left", "cross")
ROW_HEIGHT = 0.055
"""Of the upper panel."""


def blank_figure(width: float, height: float) -> Any:
    """A figure of so many inches. Raises ConfigError where matplotlib is not installed."""
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


def write_png(shown: RunFigure, path: Path) -> None:
    """Write the picture. Raises ConfigError where matplotlib is not installed."""
    figure = blank_figure(11, 6.2)
    heights = [LOSS_SHARE, 1 - LOSS_SHARE][: len(shown.panels)]
    rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    axes = [row[0] for row in rows]
    for panel, drawn in zip(shown.panels, axes, strict=True):
        _draw_panel(drawn, panel, shown.spans)
    _draw_rate(axes[-1], shown)
    _draw_marks(axes[0], shown)
    axes[0].set_title(shown.title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=22)
    axes[-1].set_xlabel("optimizer step", color=INK)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    margin = max(1.0, (shown.last_step - shown.first_step) * 0.015)
    axes[-1].set_xlim(shown.first_step - margin, shown.last_step + margin)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


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
        _draw_log_axis(axes, panel.lines[0].series[1])
    axes.set_ylabel(panel.name, color=INK)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(which="both", colors=GREY, labelsize=9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_log_axis(axes: Any, values: list[float]) -> None:
    """Write 0.5, 1, 2 instead of powers of ten, and more of them where there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    narrow = max(values) / min(values) < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_rate(axes: Any, shown: RunFigure) -> None:
    if shown.rate is None:
        return
    right = axes.twinx()
    right.plot(*shown.rate.series, color=AMBER, linewidth=shown.rate.width)
    right.set_ylabel(shown.rate.name, color=AMBER, fontsize=9)
    right.tick_params(colors=AMBER, labelsize=8)
    right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    right.spines[["top", "left", "bottom"]].set_visible(False)


def _draw_marks(axes: Any, shown: RunFigure) -> None:
    edge = axes.get_xaxis_transform()
    for marks in shown.marks:
        heights = [1.025 + ROW_HEIGHT * marks.row] * len(marks.steps)
        look = {"marker": MARKERS[marks.symbol], "s": 42, "edgecolors": marks.colour}
        look["facecolors"] = marks.colour if marks.symbol in FILLED else "white"
        axes.scatter(marks.steps, heights, label=marks.name, transform=edge, clip_on=False, **look)
    if shown.marks:
        above = 1.06 + ROW_HEIGHT * max(marks.row for marks in shown.marks)
        corner = {"loc": "lower right", "bbox_to_anchor": (1.0, above), "ncols": 3}
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.0, **corner)
    for row, label in enumerate(shown.labels):
        side = -1 if label.step > shown.middle else 1
        axes.annotate(
            label.text,
            xy=(label.step, 1.0),
            xycoords=edge,
            xytext=(8 * side, -12 - 15 * row),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=9,
            color=RED,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"},
        )


# --- Draw the losses of every trial as a PNG, with matplotlib (extra `plot`) and without a
# display.


WORKING = (BLUE, AMBER, PALE_BLUE, INK)
"""Colours of candidates that work, the best first; those that do not are red and dashed."""
WIDE = 100.0
"""Largest over smallest loss above which the axis is logarithmic."""


def write_trials_png(found: WhatIf, path: Path) -> None:
    """Write the picture. Raises ConfigError where matplotlib is not installed."""
    figure = blank_figure(11, 5)
    axes: Any = figure.subplots()
    colours = iter(WORKING)
    for outcome in found.outcomes:
        if outcome.losses:
            colour = next(colours, GREY) if outcome.works else RED
            _draw(axes, found, outcome, colour)
    axes.axvline(found.step, color=GREY, linewidth=1, linestyle=":")
    if _spread(found) > WIDE:
        axes.set_yscale("log")
    axes.set_title(f"what if: {found.incident}", loc="left", color=INK, fontweight="bold")
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    if axes.get_lines() and found.outcomes:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


def _draw(axes: Any, found: WhatIf, outcome: TrialOutcome, colour: str) -> None:
    """One line of finite losses; a cross at the upper edge where one was not."""
    steps = [found.first + place for place in range(len(outcome.losses))]
    line = "-" if outcome.works else "--"
    width = 2.0 if outcome is found.best else 1.2
    axes.plot(
        steps, outcome.losses, color=colour, linestyle=line, linewidth=width, label=outcome.label
    )
    bad = [
        step for step, loss in zip(steps, outcome.losses, strict=True) if not math.isfinite(loss)
    ]
    edge = axes.get_xaxis_transform()
    axes.plot(bad, [0.98] * len(bad), "X", color=colour, transform=edge, clip_on=False)


def _spread(found: WhatIf) -> float:
    losses = [abs(loss) for outcome in found.outcomes for loss in outcome.losses]
    known = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    return max(known, default=1.0) / min(known, default=1.0)


# --- Draw the plot of a run as a web page with zoom and hover, with plotly (extra `plot`).


SYMBOLS = {
    "triangle": "triangle-down",
    "diamond": "diamond-open",
    "circle": "circle-open",
    "square": "square-open",
    "left": "triangle-left",
    "cross": "x",
}


def write_html(shown: RunFigure, path: Path) -> None:
    """Write a page that needs no network. Raises ConfigError where plotly is not installed."""
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ConfigError(
            "a web page needs plotly, which is not installed: pip install 'stepguard[plot]'."
        ) from error
    count = len(shown.panels)
    heights = [LOSS_SHARE, 1 - LOSS_SHARE][:count]
    figure = make_subplots(
        rows=count, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=heights
    )
    for row, panel in enumerate(shown.panels, start=1):
        _add_panel(figure, panel, row)
    _add_rate(figure, shown)
    _add_marks(figure, shown)
    figure.update_xaxes(title="optimizer step", row=count, col=1)
    figure.update_layout(
        template="plotly_white",
        title=shown.title,
        hovermode="x unified",
        height=700,
        font_color=INK,
        legend={"orientation": "h", "y": 1.08, "x": 1, "xanchor": "right"},
    )
    page = figure.to_html(include_plotlyjs=True, full_html=True)
    replace_file(path, page.encode("utf-8"))


def _add_panel(figure: Any, panel: Panel, row: int) -> None:
    for line in panel.lines:
        x, y = line.series
        look = {"color": line.colour, "width": 1.5 * line.width}
        if line.left:
            look["dash"] = "dot"
        figure.add_scatter(x=x, y=y, name=line.name, mode="lines", line=look, row=row, col=1)
    # plotly has no symlog axis; a linear one still shows every value.
    kind = "log" if panel.scale == "log" else "linear"
    figure.update_yaxes(title=panel.name, type=kind, row=row, col=1)


def _add_rate(figure: Any, shown: RunFigure) -> None:
    if shown.rate is None:
        return
    x, y = shown.rate.series
    # The panels have the axes y, y2, ...: the next free number is one more than there are panels.
    lowest = len(shown.panels)
    below = "" if lowest == 1 else str(lowest)
    look = {"color": AMBER, "width": 1}
    figure.add_scatter(
        x=x,
        y=y,
        name=shown.rate.name,
        mode="lines",
        line=look,
        xaxis=f"x{below}",
        yaxis=f"y{lowest + 1}",
    )
    axis = {"overlaying": f"y{below}", "side": "right", "showgrid": False, "color": AMBER}
    axis |= {"exponentformat": "e", "nticks": 4, "title": shown.rate.name}
    figure.update_layout({f"yaxis{lowest + 1}": axis})


def _add_marks(figure: Any, shown: RunFigure) -> None:
    for marks in shown.marks:
        look = {"symbol": SYMBOLS[marks.symbol], "color": marks.colour, "size": 11}
        at = [_upper_edge(shown.panels[0], marks.row)] * len(marks.steps)
        figure.add_scatter(
            x=marks.steps, y=at, name=marks.name, mode="markers", marker=look, row=1, col=1
        )
    for row, label in enumerate(shown.labels):
        words = {"text": label.text, "font": {"color": RED}, "yshift": -24 - 16 * row}
        side = "top left" if label.step > shown.middle else "top right"
        line = {"color": RED, "width": 1, "dash": "dot"}
        figure.add_vline(
            x=label.step, line=line, annotation=words, annotation_position=side, row=1, col=1
        )


def _upper_edge(panel: Panel, row: int) -> float:
    """Just above the highest loss, one row of marks above the other."""
    values = [value for line in panel.lines for value in line.series[1]] or [1.0]
    highest = max(values)
    lowest = min(values)
    share = 0.08 * (row + 1)
    if panel.scale == "log":
        # At least a tenth of a decade, where the loss hardly moves.
        return float(highest * max(highest / lowest, 1.26) ** share)
    return float(highest + share * ((highest - lowest) or 1.0))

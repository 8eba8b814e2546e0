"""Draw the plot of a run as a PNG, with matplotlib (extra `plot`) and without a display."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.report.curves import symlog_threshold
from stepguard.report.figure import (
    AMBER,
    GREY,
    GRID,
    INK,
    LOSS_SHARE,
    RED,
    Panel,
    RunFigure,
    replace_file,
)

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

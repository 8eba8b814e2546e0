"""Draw a run, or the trials of `whatif`, as a PNG: matplotlib (extra `plot`), no display."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from stepguard._errors import ConfigError
from stepguard.records.probes import WhatIf
from stepguard.report import phrases
from stepguard.report.story import Run
from stepguard.report.summary import group_incidents, stretches

MOST_LABELS = 6
SMOOTH_OVER = 25
"""At least this many values are one median; more in long runs."""
ROW_HEIGHT = 0.055
"""Height of one row of marks, as a share of the upper panel."""

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


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_bytes(content)
    fresh.replace(path)


def write_png(figure: Any, path: Path) -> None:
    """Write what was drawn."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


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


def draw_run(run: Run, title: str) -> Any:
    """Draw loss, gradient norm and learning rate, with a mark for whatever was not ordinary.

    Non-finite values are in no curve; their steps are marks along the upper edge. Raises
    ConfigError where matplotlib is not installed.
    """
    table = run.steps
    figure = _blank_figure(11, 6.2)
    heights = [0.68]
    if len(table.values("grad_norm")):
        heights.append(0.32)
    rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    upper, lowest = rows[0][0], rows[-1][0]
    _draw_curves(upper, run, "loss", "loss", (BLUE, PALE_BLUE))
    if lowest is not upper:
        _draw_curves(lowest, run, "grad_norm", "gradient norm", (TEAL, PALE_TEAL))
    rate = table.column("lr").where(table.kept)
    if len(set(rate.values.tolist())) > 1:
        right = lowest.twinx()
        right.plot(table.step[rate.rows], rate.values, color=AMBER, linewidth=0.9)
        right.set_ylabel("learning rate", color=AMBER, fontsize=9)
        right.tick_params(colors=AMBER, labelsize=8)
        right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        right.spines[["top", "left", "bottom"]].set_visible(False)
    edge = upper.get_xaxis_transform()
    # Each kind has a row of its own, so that none covers another.
    above = 1.025
    for kind, steps in _marks(run).items():
        marker, colour, face = MARKERS[kind]
        look = {"marker": marker, "s": 42, "edgecolors": colour, "facecolors": face}
        label = f"{kind} ({len(steps):,})"
        upper.scatter(
            steps, [above] * len(steps), label=label, transform=edge, clip_on=False, **look
        )
        above += ROW_HEIGHT
    if upper.get_legend_handles_labels()[0]:
        corner = {"loc": "lower right", "bbox_to_anchor": (1.0, above - 0.02), "ncols": 3}
        upper.legend(frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.0, **corner)
    first, last = int(table.step.min()), int(table.step.max())
    for row, group in enumerate(group_incidents(run)[:MOST_LABELS]):
        text = f"{group.code or phrases.verdict_title(group.verdict)} at step {group.first_step}"
        if group.count > 1:
            text += f" (x{group.count})"
        side, away = "left", 8
        if group.first_step > (first + last) / 2:
            side, away = "right", -8
        upper.annotate(
            text,
            xy=(group.first_step, 1.0),
            xycoords=edge,
            xytext=(away, -12 - 15 * row),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=9,
            color=RED,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"},
        )
    upper.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=22)
    lowest.set_xlabel("optimizer step", color=INK)
    lowest.xaxis.get_major_locator().set_params(integer=True)
    margin = max(1.0, (last - first) * 0.015)
    lowest.set_xlim(first - margin, last + margin)
    return figure


def _draw_curves(axes: Any, run: Run, column: str, name: str, colours: tuple[str, str]) -> None:
    """Draw the line that counts with its running median, and dotted what no longer counts."""
    table = run.steps
    series = table.column(column)
    series = series.where(np.isin(np.arange(len(table)), series.rows[series.finite]))
    counting = series.where(table.kept)
    steps, values = table.step[counting.rows], counting.values
    # A running median, which a single spike cannot bend; short runs have none.
    window = min(max(SMOOTH_OVER, len(values) // 200), len(values) // 8)
    if window >= 3:
        half = window // 2
        # For long runs one median every few steps is as smooth and far cheaper.
        every = max(1, len(values) // 2000)
        windows = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)[::every]
        middle = np.median(windows, axis=1)
        axes.plot(steps, values, color=colours[1], linewidth=0.8)
        axes.plot(steps[half : len(values) - half : every], middle, color=colours[0], linewidth=1.8)
    else:
        axes.plot(steps, values, color=colours[0], linewidth=1.1)
    for branch in run.branches:
        left = ~table.kept
        left[: branch.first_row] = left[branch.end_row :] = False
        gone = series.where(left)
        if len(gone):
            look = {"color": GREY, "linewidth": 0.9, "linestyle": ":"}
            axes.plot(table.step[gone.rows], gone.values, **look)
    spans = stretches(table.step[table.dropped & table.kept].tolist())
    bars = [(first - 0.5, last - first + 1) for first, last in spans]
    shade = {"facecolors": RED, "alpha": 0.08, "zorder": 0}
    axes.broken_barh(bars, (0, 1), transform=axes.get_xaxis_transform(), **shade)
    if not len(values):
        middle_of = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, f"no finite {name}", color=GREY, **middle_of)
        axes.set_yticks([])
    elif values.min() > 0:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        # 0.5, 1, 2 instead of powers of ten, and more of them where there are few decades
        narrow = values.max() / values.min() < 100
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif values.any():
        # Linear below the usual size of the values, logarithmic above it.
        axes.set_yscale("symlog", linthresh=float(np.median(np.abs(values[values != 0]))))
    axes.set_ylabel(name, color=INK)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(which="both", colors=GREY, labelsize=9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _marks(run: Run) -> dict[str, list[int]]:
    """Steps by kind of mark; without a finite loss they have no height of their own."""
    table = run.steps
    done: dict[str, list[int]] = {"partial": [], "let_through": []}
    for one in run.incidents:
        if one.done in done and one.row is not None:
            done[one.done].append(int(table.step[one.row]))
    # A non-finite loss that was committed without a word: a loop without a guard.
    loss = table.column("loss").where(table.committed & (table.incident < 0))
    found = {
        "update dropped": table.step[table.dropped].tolist(),
        "made without a part of the batch": done["partial"],
        "let through": done["let_through"],
        "not finite": table.step[loss.rows[~loss.finite]].tolist(),
        "rewound": [left.came_from for left in run.goings_back if left.by == "rewind"],
        "started again": [left.to for left in run.goings_back if left.by == "restart"],
        "loss-scale calibration": table.step[table.calibration].tolist(),
    }
    return {kind: steps for kind, steps in found.items() if steps}


def draw_trials(found: WhatIf) -> Any:
    """Draw the losses of every trial. Raises ConfigError where matplotlib is not installed."""
    figure = _blank_figure(11, 5)
    axes: Any = figure.subplots()
    edge = axes.get_xaxis_transform()
    # Candidates that work have these colours, the best first; those that do not are red and dashed.
    colours = iter((BLUE, AMBER, PALE_BLUE, INK))
    for outcome in found.outcomes:
        if not outcome.losses:
            continue
        colour, look = RED, {"linestyle": "--", "linewidth": 1.2}
        if outcome.works:
            colour, look["linestyle"] = next(colours, GREY), "-"
        if outcome is found.best:
            look["linewidth"] = 2.0
        losses = np.array(outcome.losses)
        steps = np.arange(found.first, found.first + len(losses))
        axes.plot(steps, losses, color=colour, label=outcome.label, **look)
        bad = steps[~np.isfinite(losses)]
        axes.plot(bad, [0.98] * len(bad), "X", color=colour, transform=edge, clip_on=False)
    axes.axvline(found.step, color=GREY, linewidth=1, linestyle=":")
    every = (abs(loss) for outcome in found.outcomes for loss in outcome.losses)
    sizes = [size for size in every if size and math.isfinite(size)]
    if max(sizes, default=1.0) > 100 * min(sizes, default=1.0):
        axes.set_yscale("log")
    axes.set_title(f"what if: {found.incident}", loc="left", color=INK, fontweight="bold")
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    if found.outcomes:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return figure

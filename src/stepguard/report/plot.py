"""Draw a run as a PNG: matplotlib (extra `plot`), no display."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from stepguard._errors import ConfigError
from stepguard.report import phrases
from stepguard.report.story import Run
from stepguard.report.summary import group_incidents, stretches

INK = "#1f2933"
GRID = "#e4e7eb"
BLUE = "#2563eb"
TEAL = "#0f766e"
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


def draw_run(run: Run, title: str) -> Any:
    """Draw loss, gradient norm and learning rate, with a mark for whatever was not ordinary.

    Non-finite values are in no curve; their steps are marks along the upper edge. Raises
    ConfigError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed: pip install 'stepguard[plot]'."
        ) from error
    # A Figure of its own, not pyplot: the user's backend and open figures stay as they are.
    figure = Figure(figsize=(11, 6.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    table = run.steps
    drawn = [("loss", "loss", BLUE), ("grad_norm", "gradient norm", TEAL)]
    if not len(table.values("grad_norm")):
        del drawn[1]
    rows = figure.subplots(
        len(drawn), 1, sharex=True, height_ratios=[0.68, 0.32][: len(drawn)], squeeze=False
    )
    for (axes,), (column, name, colour) in zip(rows, drawn, strict=True):
        _draw_curves(axes, run, column, name, colour)
    upper, lowest = rows[0][0], rows[-1][0]
    rate = table.column("lr").where(table.kept)
    if len(set(rate.values.tolist())) > 1:
        right = lowest.twinx()
        right.plot(table.step[rate.rows], rate.values, color=AMBER, linewidth=0.9)
        right.set_ylabel("learning rate", color=AMBER)
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
        # Height of one row of marks, as a share of the upper panel
        above += 0.055
    if above > 1.025:
        corner = {"loc": "lower right", "bbox_to_anchor": (1.0, above - 0.02), "ncols": 3}
        upper.legend(frameon=False, fontsize=9, **corner)
    middle = (int(table.step.min()) + int(table.step.max())) / 2
    for row, group in enumerate(group_incidents(run)[:6]):
        text = f"{group.code or phrases.verdict_title(group.verdict)} at step {group.first_step}"
        if group.count > 1:
            text += f" (x{group.count})"
        # towards the middle of the picture
        side, away = ("right", -8) if group.first_step > middle else ("left", 8)
        place = {"xycoords": edge, "xytext": (away, -12 - 15 * row), "textcoords": "offset points"}
        upper.annotate(text, xy=(group.first_step, 1.0), ha=side, color=RED, **place)
    upper.set_title(title, loc="left", color=INK, fontweight="bold", pad=22)
    lowest.set_xlabel("optimizer step", color=INK)
    lowest.xaxis.get_major_locator().set_params(integer=True)
    return figure


def write_png(figure: Any, path: Path) -> None:
    """Write what was drawn."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


def _draw_curves(axes: Any, run: Run, column: str, name: str, colour: str) -> None:
    """Draw the line that counts, dotted what was left, and shade the dropped updates."""
    table = run.steps
    series = table.column(column)
    series = series.where(np.isin(np.arange(len(table)), series.rows[series.finite]))
    counting = series.where(table.kept)
    values = counting.values
    axes.plot(table.step[counting.rows], values, color=colour, linewidth=1.1)
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
        axes.set_yscale("log")
    elif values.any():
        # Linear below the usual size of the values, logarithmic above it.
        axes.set_yscale("symlog", linthresh=float(np.median(np.abs(values[values != 0]))))
    axes.set_ylabel(name, color=INK)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
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

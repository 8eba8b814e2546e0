"""The loss curve as a PNG (matplotlib, extra `plot`) or as a web page of its own (plotly)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.records import Incident
from stepguard.report.curves import Curves, Series, decimate, gather, symlog_threshold

INK, PALE, GRID = "#1f2933", "#9aa5b1", "#e4e7eb"
BLUE, TEAL, AMBER, RED, GREY = "#2563eb", "#0f766e", "#d97706", "#dc2626", "#7b8794"
LOSS_SHARE = 0.68
"""Height of the loss panel; the gradient norm has the rest."""


def write_png(
    steps: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], path: Path, *, title: str = ""
) -> None:
    """Draw the run without a display. ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed: pip install 'stepguard[plot]', "
            "or write a web page instead with --format html."
        ) from error
    # a Figure of its own, not pyplot: the user's backend and open figures stay as they are
    figure = Figure(figsize=(11, 6.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure, gather(steps, incidents), title)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    figure.savefig(fresh, format="png")
    fresh.replace(path)


def _draw(figure: Any, curves: Curves, title: str) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[LOSS_SHARE, 1 - LOSS_SHARE])
    _curve(top, curves.loss, curves.loss_scale, BLUE, smooth=curves.smooth_loss)
    _curve(bottom, curves.norm, curves.norm_scale, TEAL)
    figure.align_ylabels([top, bottom])
    _learning_rate(bottom, curves)
    for axes, name in ((top, "loss"), (bottom, "gradient norm")):
        _tidy(axes, name)
        for step in curves.vetoed[:500]:
            axes.axvline(step, color=RED, alpha=0.10, linewidth=1, zorder=0)
    top.set_title(title or "training loss", loc="left", color=INK, fontsize=12, fontweight="bold", pad=22)
    _marks(top, curves)
    _incident_labels(top, curves)
    bottom.set_xlabel("optimizer step", color=INK)
    margin = max(1.0, (curves.last_step - curves.first_step) * 0.015)
    bottom.set_xlim(curves.first_step - margin, curves.last_step + margin)


def _curve(axes: Any, series: Series, scale: str, colour: str, smooth: Series | None = None) -> None:
    smoothed = bool(smooth and smooth[0])
    axes.plot(*series, color=colour, linewidth=0.8 if smoothed else 1.1, alpha=0.35 if smoothed else 0.95, zorder=2)
    if smooth and smoothed:
        axes.plot(*smooth, color=colour, linewidth=1.8, zorder=3)
    if scale == "symlog":
        axes.set_yscale("symlog", linthresh=symlog_threshold(series[1]))
        return
    axes.set_yscale(scale)
    if scale == "log":
        _plain_log_ticks(axes, series[1])


def _plain_log_ticks(axes: Any, values: Sequence[float]) -> None:
    """0.5, 1, 2 instead of powers of ten, with more of them the fewer decades there are."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    narrow = max(values) / min(values) < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _tidy(axes: Any, name: str) -> None:
    axes.set_ylabel(name, color=INK)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(which="both", colors=GREY, labelsize=9)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(PALE)


def _learning_rate(axes: Any, curves: Curves) -> None:
    if len(set(curves.rate[1])) < 2:
        return
    twin = axes.twinx()
    twin.plot(*curves.rate, color=AMBER, linewidth=0.9, alpha=0.9)
    twin.set_ylabel("learning rate", color=AMBER, fontsize=9)
    twin.tick_params(colors=AMBER, labelsize=8)
    twin.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    twin.yaxis.get_offset_text().set(color=AMBER, fontsize=8)
    for side, spine in twin.spines.items():
        spine.set_visible(side == "right")
        spine.set_color(PALE)


def _marks(axes: Any, curves: Curves) -> None:
    """Marks along the upper edge: a step without a finite loss has no height of its own."""
    kinds = (
        (curves.vetoed, "v", RED, RED, "update dropped"),
        (curves.let_through, "D", RED, "white", "let through"),
        (curves.calibrations, "o", GREY, "white", "loss-scale calibration"),
    )
    for steps, mark, edge, face, name in kinds:
        if steps:
            at = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            look = {"marker": mark, "s": 42, "edgecolors": edge, "facecolors": face, "linewidths": 1.3}
            axes.scatter(steps, [1.025] * len(steps), label=f"{name} ({len(steps):,})", **look, **at)
    if curves.vetoed or curves.let_through or curves.calibrations:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.06), "ncols": 3, "borderaxespad": 0.0}
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, handletextpad=0.2, **place)


def _incident_labels(axes: Any, curves: Curves) -> None:
    middle = (curves.first_step + curves.last_step) / 2
    for row, label in enumerate(curves.labels):
        left = label.step > middle
        axes.annotate(
            label.text,
            xy=(label.step, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-8 if left else 8, -12 - 15 * row),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9,
            color=RED,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            zorder=6,
        )


def write_html(
    steps: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], path: Path, *, title: str = ""
) -> None:
    """A page that needs no network: zoom, hover, and the same marks as the PNG."""
    from plotly.subplots import make_subplots

    curves = gather(steps, incidents)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[LOSS_SHARE, 0.32])
    _add_lines(figure, curves)
    _add_marks(figure, curves)
    figure.update_layout(template="plotly_white", title=title or "training loss", hovermode="x unified", height=720)
    figure.update_layout(font_color=INK, legend={"orientation": "h", "y": 1.08, "x": 1, "xanchor": "right"})
    # plotly has no symlog; a linear axis still shows every value
    figure.update_yaxes(title="loss", type="log" if curves.loss_scale == "log" else "linear", row=1, col=1)
    figure.update_yaxes(title="gradient norm", type="log" if curves.norm_scale == "log" else "linear", row=2, col=1)
    figure.update_xaxes(title="optimizer step", row=2, col=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    fresh.replace(path)


def _add_lines(figure: Any, curves: Curves) -> None:
    lines = (
        ("loss", curves.loss, BLUE, 1.2, 1),
        ("loss, running median", curves.smooth_loss, "#1e3a8a", 2.4, 1),
        ("gradient norm", curves.norm, TEAL, 1.2, 2),
    )
    for name, series, colour, width, row in lines:
        if series[0]:
            x, y = decimate(series)
            figure.add_scatter(
                x=x, y=y, name=name, mode="lines", line={"color": colour, "width": width}, row=row, col=1
            )
    if len(set(curves.rate[1])) > 1:
        x, y = decimate(curves.rate)
        line = {"color": AMBER, "width": 1}
        figure.add_scatter(x=x, y=y, name="learning rate", mode="lines", line=line, yaxis="y3", xaxis="x2")
        figure.update_layout(yaxis3={"overlaying": "y2", "side": "right", "showgrid": False, "color": AMBER})


def _add_marks(figure: Any, curves: Curves) -> None:
    kinds = (
        (curves.vetoed, "triangle-down", RED, "update dropped"),
        (curves.let_through, "diamond-open", RED, "let through"),
        (curves.calibrations, "circle-open", GREY, "loss-scale calibration"),
    )
    edge = max(curves.loss[1], default=1.0)
    for steps, symbol, colour, name in kinds:
        if steps:
            look = {"symbol": symbol, "color": colour, "size": 11}
            text = f"{name} ({len(steps):,})"
            figure.add_scatter(x=steps, y=[edge] * len(steps), name=text, mode="markers", marker=look, row=1, col=1)
    for row, label in enumerate(curves.labels):
        line = {"color": RED, "width": 1, "dash": "dot"}
        figure.add_vline(x=label.step, line=line, annotation_text=label.text, annotation_yshift=-16 * row, row=1, col=1)

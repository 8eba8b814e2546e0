"""The loss curve as a PNG (matplotlib, extra `plot`) or as a web page of its own (plotly)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.records import Incident
from stepguard.report.curves import (
    Curves,
    Series,
    decimate,
    gather,
    stretches,
    symlog_threshold,
    thin,
)

INK, PALE, GRID = "#1f2933", "#9aa5b1", "#e4e7eb"
BLUE, TEAL, AMBER, RED, GREY = "#2563eb", "#0f766e", "#d97706", "#dc2626", "#7b8794"
LOSS_SHARE = 0.68
"""Height of the loss panel; the gradient norm has the rest."""
MOST_SPANS = 300


def write_png(
    steps: Sequence[Mapping[str, Any]],
    incidents: Sequence[Incident],
    path: Path,
    *,
    title: str = "",
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
    top, *below = _panels(figure, curves)
    _curve(top, curves.loss, curves.loss_scale, BLUE, curves.smooth_loss)
    for axes in below:
        _curve(axes, curves.norm, curves.norm_scale, TEAL, curves.smooth_norm)
        _learning_rate(axes, curves)
    for axes, name in zip((top, *below), ("loss", "gradient norm"), strict=False):
        _tidy(axes, name)
        for first, last in stretches(curves.vetoed)[:MOST_SPANS]:
            axes.axvspan(first - 0.5, last + 0.5, color=RED, alpha=0.08, linewidth=0.8, zorder=0)
    top.set_title(
        title or "training loss", loc="left", color=INK, fontsize=12, fontweight="bold", pad=22
    )
    if not curves.loss[0]:
        top.text(
            0.5,
            0.5,
            "no finite loss",
            transform=top.transAxes,
            color=GREY,
            ha="center",
            va="center",
        )
        top.set_yticks([])
    _marks(top, curves)
    _incident_labels(top, curves)
    lowest = below[0] if below else top
    lowest.set_xlabel("optimizer step", color=INK)
    lowest.xaxis.get_major_locator().set_params(integer=True)
    margin = max(1.0, (curves.last_step - curves.first_step) * 0.015)
    lowest.set_xlim(curves.first_step - margin, curves.last_step + margin)


def _panels(figure: Any, curves: Curves) -> list[Any]:
    """The loss, and below it the gradient norm where there is one."""
    if not curves.norm[0]:
        return [figure.subplots()]
    panels = list(figure.subplots(2, 1, sharex=True, height_ratios=[LOSS_SHARE, 1 - LOSS_SHARE]))
    figure.align_ylabels(panels)
    return panels


def _curve(axes: Any, series: Series, scale: str, colour: str, smooth: Series) -> None:
    smoothed = bool(smooth[0])
    axes.plot(
        *series,
        color=colour,
        linewidth=0.8 if smoothed else 1.1,
        alpha=0.45 if smoothed else 0.95,
        zorder=2,
    )
    if smoothed:
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
            look = {
                "marker": mark,
                "s": 42,
                "edgecolors": edge,
                "facecolors": face,
                "linewidths": 1.3,
            }
            shown = thin(steps)
            axes.scatter(
                shown, [1.025] * len(shown), label=f"{name} ({len(steps):,})", **look, **at
            )
    if curves.vetoed or curves.let_through or curves.calibrations:
        place = {
            "loc": "lower right",
            "bbox_to_anchor": (1.0, 1.06),
            "ncols": 3,
            "borderaxespad": 0.0,
        }
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
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.85,
            },
            zorder=6,
        )


def write_html(
    steps: Sequence[Mapping[str, Any]],
    incidents: Sequence[Incident],
    path: Path,
    *,
    title: str = "",
) -> None:
    """A page that needs no network: zoom, hover, and the same marks as the PNG."""
    from plotly.subplots import make_subplots

    curves = gather(steps, incidents)
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[LOSS_SHARE, 0.32]
    )
    _add_lines(figure, curves)
    _add_marks(figure, curves)
    figure.update_layout(
        template="plotly_white", title=title or "training loss", hovermode="x unified", height=700
    )
    figure.update_layout(
        font_color=INK, legend={"orientation": "h", "y": 1.08, "x": 1, "xanchor": "right"}
    )
    # plotly has no symlog; a linear axis still shows every value
    figure.update_yaxes(
        title="loss", type="log" if curves.loss_scale == "log" else "linear", row=1, col=1
    )
    figure.update_yaxes(
        title="gradient norm", type="log" if curves.norm_scale == "log" else "linear", row=2, col=1
    )
    figure.update_xaxes(title="optimizer step", row=2, col=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    fresh.replace(path)


def _add_lines(figure: Any, curves: Curves) -> None:
    lines = (
        ("loss", curves.loss, "#93b4f5" if curves.smooth_loss[0] else BLUE, 1.2, 1),
        ("loss, running median", curves.smooth_loss, BLUE, 2.4, 1),
        ("gradient norm", curves.norm, "#86bdb8" if curves.smooth_norm[0] else TEAL, 1.2, 2),
        ("norm, running median", curves.smooth_norm, TEAL, 2.0, 2),
    )
    for name, series, colour, width, row in lines:
        if series[0]:
            x, y = decimate(series)
            figure.add_scatter(
                x=x,
                y=y,
                name=name,
                mode="lines",
                line={"color": colour, "width": width},
                row=row,
                col=1,
            )
    if len(set(curves.rate[1])) > 1:
        x, y = decimate(curves.rate)
        line = {"color": AMBER, "width": 1}
        figure.add_scatter(
            x=x, y=y, name="learning rate", mode="lines", line=line, yaxis="y3", xaxis="x2"
        )
        axis = {
            "overlaying": "y2",
            "side": "right",
            "showgrid": False,
            "color": AMBER,
            "exponentformat": "e",
        }
        figure.update_layout(yaxis3={**axis, "nticks": 4, "title": "learning rate"})


def _add_marks(figure: Any, curves: Curves) -> None:
    kinds = (
        (curves.vetoed, "triangle-down", RED, "update dropped"),
        (curves.let_through, "diamond-open", RED, "let through"),
        (curves.calibrations, "circle-open", GREY, "loss-scale calibration"),
    )
    edge = _upper_edge(curves)
    for steps, symbol, colour, name in kinds:
        if steps:
            look = {"symbol": symbol, "color": colour, "size": 11}
            x, text = thin(steps), f"{name} ({len(steps):,})"
            figure.add_scatter(
                x=x, y=[edge] * len(x), name=text, mode="markers", marker=look, row=1, col=1
            )
    middle = (curves.first_step + curves.last_step) / 2
    for row, label in enumerate(curves.labels):
        words = {"text": label.text, "font": {"color": RED}, "yshift": -24 - 16 * row}
        side = "top left" if label.step > middle else "top right"
        line = {"color": RED, "width": 1, "dash": "dot"}
        figure.add_vline(
            x=label.step, line=line, annotation=words, annotation_position=side, row=1, col=1
        )


def _upper_edge(curves: Curves) -> float:
    """Just above the highest loss."""
    values = curves.loss[1] or [1.0]
    if curves.loss_scale == "log":
        return max(values) * 1.2
    return max(values) + 0.08 * ((max(values) - min(values)) or 1.0)

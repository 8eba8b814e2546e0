"""Draw the plot of a run as a web page with zoom and hover, with plotly (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.report.figure import AMBER, INK, LOSS_SHARE, RED, Panel, RunFigure, replace_file

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

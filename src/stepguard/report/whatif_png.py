"""Draw the losses of every trial as a PNG, with matplotlib (extra `plot`) and without a display."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

from stepguard.records.whatif import TrialOutcome, WhatIf
from stepguard.report.figure import AMBER, BLUE, GREY, GRID, INK, PALE_BLUE, RED, replace_file
from stepguard.report.plot_png import blank_figure

WORKING = (BLUE, AMBER, PALE_BLUE, INK)
"""Colours of candidates that work, the best first; those that do not are red and dashed."""
WIDE = 100.0
"""Largest over smallest loss above which the axis is logarithmic."""


def write_png(found: WhatIf, path: Path) -> None:
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

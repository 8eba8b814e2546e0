"""The table and the picture of a recipe's four modes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from recipes.common.expect import Expectation
from recipes.common.outcome import Mode, Outcome

COLOURS: dict[str, str] = {"healthy": "#2a9d5c", "unguarded": "#c0392b", "seedfix": "#e08e2b", "guarded": "#2667c9"}


def table(name: str, expected: Expectation, outcomes: Mapping[Mode, Outcome]) -> Table:
    """One row a mode."""
    healthy = outcomes["healthy"].metric
    drawn = Table(title=name, title_justify="left")
    for heading in ("mode", "first bad", "detected", "origin", "cause", "done", "bad tensors", expected.metric, "vs healthy"):
        drawn.add_column(heading, overflow="fold")
    for mode, outcome in outcomes.items():
        bad = outcome.bad_parameters + outcome.bad_buffers
        drawn.add_row(
            Text(mode, style="bold"),
            _step(outcome.first_bad),
            _step(outcome.detected),
            _origin(outcome),
            outcome.cause or "-",
            outcome.actions or "-",
            Text(f"{bad} of {outcome.tensors}", style="bold red" if bad else "green"),
            f"{outcome.metric:.4g}",
            _distance(healthy, outcome.metric),
        )
    return drawn


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def _origin(outcome: Outcome) -> str:
    origin = outcome.incidents[0].origin if outcome.incidents else None
    if origin is None:
        return "-"
    operand = origin.inputs[0] if origin.inputs else None
    given = f" on {operand.dtype} {operand.min:.4g} to {operand.max:.4g}" if operand and operand.min is not None else ""
    where = f" in {origin.module}" if origin.module else ""
    return f"{origin.op or origin.tensor}{where} at {origin.source or '-'}{given}"


def _distance(healthy: float, metric: float) -> str:
    if not math.isfinite(metric):
        return "lost"
    return f"{(metric - healthy) / abs(healthy):+.2%}" if healthy else f"{metric - healthy:+.4g}"


def draw(path: Path, title: str, outcomes: Mapping[Mode, Outcome]) -> None:
    """Losses of the four modes; a bad step is a mark at the upper edge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=120)
    highest = max((loss for o in outcomes.values() for loss in o.losses if math.isfinite(loss) and loss > 0), default=1)
    for mode, outcome in outcomes.items():
        steps = range(len(outcome.losses))
        axes.plot(steps, [x if math.isfinite(x) else math.nan for x in outcome.losses], color=COLOURS[mode], lw=1, label=mode)
        lost = [step for step in steps if not math.isfinite(outcome.losses[step])]
        axes.plot(lost, [highest * 1.15] * len(lost), "x", color=COLOURS[mode], ms=4)
    axes.set(title=title, xlabel="step", ylabel="loss (log), x = not finite", yscale="log")
    axes.legend(loc="best", frameon=False)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)

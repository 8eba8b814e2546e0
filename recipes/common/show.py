"""The table and the picture of a recipe's four modes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from rich.table import Table
from rich.text import Text

from recipes.common.expect import Expectation
from recipes.common.outcome import Mode, Outcome

COLOURS: dict[str, str] = {
    "healthy": "#2a9d5c",
    "unguarded": "#c0392b",
    "seedfix": "#e08e2b",
    "guarded": "#2667c9",
}


def table(name: str, expected: Expectation, outcomes: Mapping[Mode, Outcome]) -> Table:
    """One row a mode."""
    healthy, also = outcomes["healthy"].metric, tuple(outcomes["healthy"].also)
    drawn = Table(title=name, title_justify="left")
    for heading in (
        "mode",
        "first bad",
        "detected",
        "origin",
        "cause",
        "done",
        "bad tensors",
        expected.metric,
        "distance",
        *also,
    ):
        drawn.add_column(heading, overflow="fold", no_wrap=heading != "origin")
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
            *(f"{outcome.also[name]:.3f}" for name in also),
        )
    return drawn


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def _origin(outcome: Outcome) -> str:
    incident = outcome.incidents[0] if outcome.incidents else None
    origin = incident.origin if incident is not None else None
    if incident is None or origin is None:
        return "-"
    if origin.op is None and origin.tensor is None:
        return f"{incident.verdict.kind}, nothing non-finite yet"
    operand = origin.inputs[0] if origin.inputs else None
    given = (
        f", {operand.dtype} {operand.min:.4g} to {operand.max:.4g}"
        if operand and operand.min is not None
        else ""
    )
    given += ", divided by 0" if origin.evidence.zero_denominator else ""
    place = PurePath(origin.source or "-").name
    samples = f", sample {', '.join(map(str, origin.samples))}" if origin.samples else ""
    return f"{origin.op or origin.tensor} in {origin.module or '-'}, {place}{given}{samples}"


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
    highest = max(
        (loss for o in outcomes.values() for loss in o.losses if math.isfinite(loss) and loss > 0),
        default=1,
    )
    for row, (mode, outcome) in enumerate(outcomes.items()):
        steps = range(len(outcome.losses))
        under = mode == "healthy"  # wider, so that it shows where another lies on it
        axes.plot(steps, smooth(outcome.losses, 1), color=COLOURS[mode], lw=0.7, alpha=0.25)
        wide = max(1, len(outcome.losses) // 25)
        axes.plot(
            steps,
            smooth(outcome.losses, wide),
            color=COLOURS[mode],
            lw=4 if under else 1.6,
            label=mode,
            alpha=0.6 if under else 1,
        )
        lost = [step for step in steps if not math.isfinite(outcome.losses[step])]
        axes.plot(lost, [highest * 1.08 ** (row + 1)] * len(lost), "x", color=COLOURS[mode], ms=4)
    axes.set(title=title, xlabel="steps run", ylabel="loss (log), x = not finite", yscale="log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=4, frameon=False)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def smooth(losses: Sequence[float], wide: int) -> list[float]:
    """Mean of the finite losses among the last `wide`; NaN, which draws nothing, where the loss
    itself is lost.
    """
    found = []
    for step, loss in enumerate(losses):
        near = [
            other for other in losses[max(0, step + 1 - wide) : step + 1] if math.isfinite(other)
        ]
        found.append(sum(near) / len(near) if math.isfinite(loss) else math.nan)
    return found

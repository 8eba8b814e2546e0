"""The series behind a plot, as plain lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from stepguard.records import Incident
from stepguard.report import phrases
from stepguard.report.summary import calibration_steps, group_incidents

Scale = Literal["log", "symlog", "linear"]
Series = tuple[list[int], list[float]]
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
class Curves:
    """Everything a plot shows. Non-finite values are in no series; their steps are marks."""

    loss: Series
    smooth_loss: Series
    loss_scale: Scale
    norm: Series
    smooth_norm: Series
    norm_scale: Scale
    rate: Series
    """Learning rate of the first parameter group."""
    vetoed: list[int] = field(default_factory=list)
    """Steps whose update was dropped because something was wrong."""
    calibrations: list[int] = field(default_factory=list)
    let_through: list[int] = field(default_factory=list)
    """Incidents that the policy let through (`note`)."""
    labels: list[Label] = field(default_factory=list)
    first_step: int = 0
    last_step: int = 0


def gather(steps: Sequence[Mapping[str, Any]], incidents: Sequence[Incident]) -> Curves:
    """The series of a run, from its step lines and incidents."""
    loss = _series(steps, "loss")
    norm = _series(steps, "grad_norm")
    calibrations = calibration_steps(steps, incidents)
    committed = {line["step"] for line in steps if line.get("committed", True)}
    dropped = {line["step"] for line in steps} - committed - calibrations
    flagged = {incident.step for incident in incidents}
    every = [line["step"] for line in steps] or [0]
    return Curves(
        loss=loss,
        smooth_loss=_smooth(loss),
        loss_scale=scale_for(loss[1]),
        norm=norm,
        smooth_norm=_smooth(norm),
        norm_scale=scale_for(norm[1]),
        rate=_rates(steps),
        vetoed=sorted(dropped | (flagged - committed)),
        calibrations=sorted(calibrations),
        let_through=sorted(flagged & committed),
        labels=_labels(incidents),
        first_step=min(every),
        last_step=max(every),
    )


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


def _series(steps: Sequence[Mapping[str, Any]], name: str) -> Series:
    numbers = []
    values = []
    for line in steps:
        if phrases.finite(line.get(name)):
            numbers.append(line["step"])
            values.append(float(line[name]))
    return numbers, values


def _rates(steps: Sequence[Mapping[str, Any]]) -> Series:
    first_rates = []
    for line in steps:
        if line.get("lr"):
            first_rates.append({"step": line["step"], "lr": line["lr"][0]})
    return _series(first_rates, "lr")


def _smooth(series: Series) -> Series:
    """A running median, which a single spike cannot bend; empty for short runs."""
    steps, values = series
    window = min(max(SMOOTH_OVER, len(values) // 200), len(values) // 8)
    if window < 3:
        return [], []
    half = window // 2
    # For long runs one median every few steps is as smooth and far cheaper.
    every = max(1, len(values) // 2000)
    middles = []
    medians = []
    for i in range(half, len(values) - half, every):
        middles.append(steps[i])
        medians.append(median(values[i - half : i + half + 1]))
    return middles, medians


def stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted steps as runs without a gap: first and last of each."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and step - runs[-1][1] <= 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


def thin(steps: Sequence[int], most: int = MOST_MARKS) -> Sequence[int]:
    """Evenly fewer marks, always with the first and the last."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _labels(incidents: Sequence[Incident]) -> list[Label]:
    labels = []
    for group in group_incidents(incidents)[:MOST_LABELS]:
        name = group.code or phrases.verdict_title(group.verdict)
        text = f"{name} at step {group.first_step}"
        if group.count > 1:
            text += f" (x{group.count})"
        labels.append(Label(step=group.first_step, text=text))
    return labels


def decimate(series: Series, most: int = 4000) -> Series:
    """Keep at most about `most` points: the lowest and highest of each stretch, so every spike."""
    steps, values = series
    if len(steps) <= most:
        return series
    stretch = math.ceil(len(steps) / (most // 2))
    kept: list[int] = []
    for start in range(0, len(steps), stretch):
        part = range(start, min(start + stretch, len(steps)))
        kept += sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)})
    return [steps[i] for i in kept], [values[i] for i in kept]

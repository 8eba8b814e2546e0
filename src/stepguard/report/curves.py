"""The series behind a plot: the line that counts, what was left behind, and what to mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

from stepguard.report import phrases
from stepguard.report.story import Run, Series, StepTable
from stepguard.report.story.model import Bools
from stepguard.report.summary import group_incidents

Scale = Literal["log", "symlog", "linear"]
Points = tuple[list[int], list[float]]
"""Steps, and a finite value for each."""
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
class Curve:
    """One quantity over the steps that count, and over those that do not."""

    points: Points
    smooth: Points
    scale: Scale
    left: list[Points] = field(default_factory=list)
    """Stretches that were left by a rewind or a restart, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Everything a plot shows. Non-finite values are in no curve; their steps are marks."""

    loss: Curve
    norm: Curve
    rate: Points
    """Learning rate of the first parameter group."""
    marks: dict[str, list[int]] = field(default_factory=dict)
    """Steps to mark, in the order of time, by what happened to them."""
    vetoed: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of each stretch without updates on the line that counts."""
    labels: list[Label] = field(default_factory=list)
    first_step: int = 0
    last_step: int = 0


def gather(run: Run) -> Curves:
    """The curves and marks of a run."""
    table = run.steps
    return Curves(
        loss=_curve(run, "loss"),
        norm=_curve(run, "grad_norm"),
        rate=_points(table, table.column("lr").where(table.kept)),
        marks=_marks(run),
        vetoed=stretches(table.step[table.dropped & table.kept].tolist()),
        labels=_labels(run),
        first_step=int(table.step.min()) if len(table) else 0,
        last_step=int(table.step.max()) if len(table) else 0,
    )


def _curve(run: Run, name: str) -> Curve:
    table = run.steps
    series = table.column(name)
    points = _points(table, series.where(table.kept))
    left = []
    for branch in run.branches:
        inside = np.zeros(len(table), np.bool_)
        inside[branch.rows] = True
        part = _points(table, series.where(inside & ~table.kept))
        if part[0]:
            left.append(part)
    return Curve(points=points, smooth=_smooth(points), scale=scale_for(points[1]), left=left)


def _points(table: StepTable, series: Series) -> Points:
    usable = series.finite
    return table.step[series.rows[usable]].tolist(), series.values[usable].tolist()


def _marks(run: Run) -> dict[str, list[int]]:
    table = run.steps
    rows_done: dict[str, list[int]] = {"partial": [], "let_through": []}
    for one in run.incidents:
        if one.done in rows_done and one.row is not None:
            rows_done[one.done].append(int(table.step[one.row]))
    found = {
        "update dropped": table.step[table.dropped].tolist(),
        "made without a part of the batch": rows_done["partial"],
        "let through": rows_done["let_through"],
        "not finite": table.step[_bad_and_committed(table)].tolist(),
        "rewound": [left.came_from for left in run.goings_back if left.by == "rewind"],
        "started again": [left.to for left in run.goings_back if left.by == "restart"],
        "loss-scale calibration": table.step[table.calibration].tolist(),
    }
    return {name: steps for name, steps in found.items() if steps}


def _bad_and_committed(table: StepTable) -> Bools:
    """Rows with a non-finite loss that were committed without a word: loops without a guard."""
    bad = np.zeros(len(table), np.bool_)
    loss = table.column("loss")
    bad[loss.rows[~loss.finite]] = True
    return bad & table.committed & (table.incident < 0)


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


def _smooth(points: Points) -> Points:
    """A running median, which a single spike cannot bend; empty for short runs."""
    steps, values = points
    window = min(max(SMOOTH_OVER, len(values) // 200), len(values) // 8)
    if window < 3:
        return [], []
    half = window // 2
    # For long runs one median every few steps is as smooth and far cheaper.
    every = max(1, len(values) // 2000)
    windows = np.lib.stride_tricks.sliding_window_view(np.array(values), 2 * half + 1)[::every]
    middles = steps[half : len(values) - half : every]
    return middles, np.median(windows, axis=1).tolist()


def stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Steps in their order as runs without a gap: first and last of each."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and 0 <= step - runs[-1][1] <= 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


def thin(steps: Sequence[int], most: int = MOST_MARKS) -> Sequence[int]:
    """Evenly fewer marks, always with the first and the last."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _labels(run: Run) -> list[Label]:
    labels = []
    for group in group_incidents(run)[:MOST_LABELS]:
        name = group.code or phrases.verdict_title(group.verdict)
        text = f"{name} at step {group.first_step}"
        if group.count > 1:
            text += f" (x{group.count})"
        labels.append(Label(step=group.first_step, text=text))
    return labels


def decimate(points: Points, most: int = 4000) -> Points:
    """Keep at most about `most` points: the lowest and highest of each stretch, so every spike."""
    steps, values = points
    if len(steps) <= most:
        return points
    stretch = -(-len(steps) // (most // 2))
    whole = len(values) - len(values) % stretch
    blocks = np.array(values[:whole]).reshape(-1, stretch)
    starts = np.arange(0, whole, stretch)
    kept = {*(starts + blocks.argmin(axis=1)).tolist(), *(starts + blocks.argmax(axis=1)).tolist()}
    rest = range(whole, len(values))
    if rest:
        kept |= {min(rest, key=values.__getitem__), max(rest, key=values.__getitem__)}
    chosen = sorted(kept)
    return [steps[i] for i in chosen], [values[i] for i in chosen]

"""The series behind a plot: which values, marks and labels there are."""

from __future__ import annotations

import math

import pytest

from report.literals import Written, masked_row, step_line, told, troubled_run
from stepguard.report.plot import decimate, describe, scale_for, thin
from stepguard.report.summary import stretches


def test_series_hold_finite_values_only() -> None:
    run = troubled_run()
    shown = describe(told(run), "")
    lines = [line for panel in shown.panels for line in panel.lines]
    assert lines and all(math.isfinite(value) for line in lines for value in line.series[1])
    assert shown.spans == [(48, 51)]
    marks = {marks.kind: marks.steps for marks in shown.marks}
    assert marks["update dropped"] == [48, 49, 50, 51]
    assert marks["loss-scale calibration"] == [0, 1]
    assert shown.labels == [(48, "SG204 at step 48 (x4)")]


def test_incident_that_was_let_through_is_not_a_veto() -> None:
    run = Written(steps=[step_line(48, 1.0)], incidents=[masked_row(48, "note")])
    shown = describe(told(run), "")
    assert [(marks.kind, marks.steps) for marks in shown.marks] == [("let through", [48])]
    assert shown.spans == []


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([], "linear"),
        ([1.0, 2.0], "log"),
        ([0.0, 1.0], "linear"),
        ([-1.0, 2.0], "linear"),
        ([-1.0, 1.0, 1e4], "symlog"),
    ],
)
def test_scale_falls_back_where_a_logarithm_cannot_show_the_values(
    values: list[float], scale: str
) -> None:
    assert scale_for(values) == scale


def test_fewer_points_keep_every_spike() -> None:
    steps = list(range(100_000))
    values = [1.0] * 100_000
    values[77_777] = 50.0
    x, y = decimate((steps, values))
    assert len(x) <= 4000 and 77_777 in x and max(y) == 50.0 and x == sorted(x)


def test_stretches_and_thinning() -> None:
    assert stretches([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 7), (9, 10)]
    kept = thin(list(range(1000)), most=10)
    assert len(kept) == 10 and kept[0] == 0 and kept[-1] == 999

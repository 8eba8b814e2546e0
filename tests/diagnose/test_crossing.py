"""A clear trend is extended to its limit; anything else is not."""

from __future__ import annotations

import math
import random

import pytest

from stepguard.diagnose.rules.sg900 import crossing


def series(count: int, value: float, slope: float, noise: float = 0.0) -> list[tuple[int, float]]:
    rng = random.Random(0)
    return [(10 * i, value + slope * 10 * i + rng.gauss(0.0, noise)) for i in range(count)]


def test_straight_line_meets_its_limit_where_it_must() -> None:
    found = crossing(series(10, 0.0, 0.1), 14.0, rising=True)
    assert found is not None
    assert (found.step, found.earliest, found.latest) == (140, 140, 140)
    assert (found.since, found.first, found.now) == (0, 1.0, 90)
    assert found.value == pytest.approx(2**9)


def test_falling_series() -> None:
    found = crossing(series(10, 16.0, -0.1), 0.0, rising=False)
    assert found is not None and found.step == 160
    assert found.first == 2.0**16
    assert found.value == pytest.approx(2**7)


def test_noise_widens_the_interval() -> None:
    found = crossing(series(20, 0.0, 0.1, noise=0.5), 30.0, rising=True)
    assert found is not None
    assert found.earliest < found.step < found.latest
    assert abs(found.step - 300) < 30


@pytest.mark.parametrize(
    "points",
    [
        series(4, 0.0, 1.0),
        series(20, 0.0, 0.0, noise=1.0),
        series(20, 0.0, 0.01, noise=2.0),
        [(10 * i, math.log(1 + i)) for i in range(20)],
        [(10 * i, 0.1 * i + 9.0 * (i > 6)) for i in range(10)],
        series(10, 0.0, -0.1),
        series(10, 20.0, 0.1),
    ],
    ids=[
        "few points",
        "noise",
        "noise above the slope",
        "levelling off",
        "jump",
        "falling",
        "past it",
    ],
)
def test_what_is_no_clear_trend_is_not_extended(points: list[tuple[int, float]]) -> None:
    assert crossing(points, 12.0, rising=True) is None


def test_limit_that_is_far_is_not_foretold() -> None:
    assert crossing(series(10, 0.0, 0.1), 1000.0, rising=True) is None


def test_gaps_and_infinite_values_are_left_out() -> None:
    points = [*series(9, 0.0, 0.1), (90, math.inf), (90, 9.0)]
    found = crossing(points, 14.0, rising=True)
    assert found is not None and found.step == 140

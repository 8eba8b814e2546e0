"""After a bad moment a guarded run ends where the best of the usual remedies ends, or better."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.parts.bad_moments import AT, MOMENTS, STEPS, Moment, begin
from benchmarks.parts.strategies import do_nothing, guarded

from benchmarks import moments

SLICE = (
    "16 bad batches in a row",
    "5 % of the batches bad",
    "NaN in a weight",
    "NaN in a running variance",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def moment(name: str) -> Moment:
    return next(one for one in MOMENTS if one.name == name)


@pytest.mark.parametrize("name", SLICE)
def test_guarded_run_ends_as_well_as_the_best_remedy(name: str) -> None:
    row = moments.measure(moment(name), seeds=[0])
    assert row["held"], row["strategies"]


@pytest.mark.parametrize("one", MOMENTS, ids=lambda one: one.name)
def test_moment_happens_at_half_way(one: Moment) -> None:
    """A moment that changes nothing would be won by everybody."""
    run, clean = begin(one, 0, STEPS), begin(Moment(name="none", kind=one.kind), 0, STEPS)
    spoiled = any(not _same(run.batch(step), clean.batch(step)) for step in range(AT, AT + 50))
    assert spoiled or one.harm is not Moment(name="none").harm


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(bool((a == b).all()) for a, b in zip(one, other, strict=True))  # type: ignore[attr-defined]


def test_nothing_is_changed_where_nothing_happens() -> None:
    calm = Moment(name="nothing happens")
    assert guarded(calm, 0, 60) == (do_nothing(calm, 0, 60)[0], "")


def test_a_lost_row_is_lost() -> None:
    """The bench can fail: a remedy that ends two per cent lower is better."""
    cells = {"stepguard": {"mean": 1.0}, "continue": {"mean": 0.97}}
    assert not moments.held(cells)
    assert moments.held({**cells, "continue": {"mean": 0.99}})
    assert not moments.held({"stepguard": {"mean": math.inf}, "continue": {"mean": 1.0}})
    assert moments.held(
        {"stepguard": {"mean": math.inf}, "continue": {"mean": math.inf}}
    )  # nobody saves that run


def test_result_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "moments.json"
    assert moments.main(["--only", "1 bad", "--quick", "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row["strategies"]["do nothing"]["mean"] is None and row["held"]

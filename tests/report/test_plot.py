"""The loss curve: which series and marks there are, and that both files are really written."""

from __future__ import annotations

import builtins
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from report.literals import NAN, masked_row, step_line, troubled_run
from stepguard._errors import ConfigError
from stepguard.report.curves import decimate, gather, scale_for, stretches, thin
from stepguard.report.plot import write_html, write_png


def test_series_hold_finite_values_only() -> None:
    run = troubled_run()
    curves = gather(run.steps, run.incidents)
    assert all(math.isfinite(value) for value in (*curves.loss[1], *curves.norm[1]))
    assert curves.vetoed == [48, 49, 50, 51]
    assert curves.calibrations == [0, 1]
    assert [label.text for label in curves.labels] == ["SG204 at step 48 (x4)"]


def test_incident_that_was_let_through_is_no_veto() -> None:
    curves = gather([step_line(48, 1.0)], [masked_row(48, "warn")])
    assert curves.let_through == [48] and curves.vetoed == []


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


def test_png_is_written_whole_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = troubled_run()
    path = tmp_path / "deep/loss_curve.png"
    before = "matplotlib.pyplot" in sys.modules  # a framework's tests may have brought it
    write_png(run.steps, run.incidents, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 10_000
    assert [entry.name for entry in path.parent.iterdir()] == ["loss_curve.png"]
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(
    "losses", [[NAN], [1.0], [-1.0, 0.0, 2.0], [0.0, 0.0], [None], [-1.0, 1.0, 1e6]]
)
def test_odd_runs_are_drawn(tmp_path: Path, losses: list[float | None]) -> None:
    pytest.importorskip("matplotlib")
    steps = [
        step_line(step, loss, lr=[1e-4 * (step + 1)], grad_norm=1.0)
        for step, loss in enumerate(losses)
    ]
    write_png(steps, [], tmp_path / "a.png")
    write_html(steps, [], tmp_path / "a.html")
    assert (tmp_path / "a.png").exists() and (tmp_path / "a.html").exists()


def test_page_needs_no_network_and_has_every_mark(tmp_path: Path) -> None:
    run = troubled_run()
    write_html(run.steps, run.incidents, tmp_path / "a.html", title="training loss: demo")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    for text in (
        "update dropped (4)",
        "loss-scale calibration (2)",
        "SG204 at step 48 (x4)",
        "training loss: demo",
    ):
        assert text in page


def test_missing_matplotlib_names_the_extra_and_the_way_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'stepguard\[plot\]'.*--format html"):
        write_png([step_line(0)], [], tmp_path / "a.png")

"""The plot as a web page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from report.literals import NAN, Written, step_line, told, troubled_run
from stepguard._errors import ConfigError
from stepguard.report.plot import describe, write_html

pytest.importorskip("plotly")


@pytest.mark.slow
def test_page_needs_no_network_and_has_every_mark(tmp_path: Path) -> None:
    run = troubled_run()
    write_html(describe(told(run), "training loss: demo"), tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    for text in (
        "update dropped (4)",
        "loss-scale calibration (2)",
        "SG204 at step 48 (x4)",
        "training loss: demo",
    ):
        assert text in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "losses", [[NAN], [1.0], [-1.0, 0.0, 2.0], [0.0, 0.0], [None], [-1.0, 1.0, 1e6]]
)
@pytest.mark.parametrize("norm", [1.0, None])
def test_odd_runs_are_drawn(tmp_path: Path, losses: list[float | None], norm: float | None) -> None:
    steps = [
        step_line(step, loss, lr=[1e-4 * (step + 1)], grad_norm=norm)
        for step, loss in enumerate(losses)
    ]
    write_html(describe(told(Written(steps=steps)), ""), tmp_path / "a.html")
    assert (tmp_path / "a.html").stat().st_size > 1000


def test_missing_plotly_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    shown = describe(told(Written(steps=[step_line(0)])), "")
    with pytest.raises(ConfigError, match=r"needs plotly.*pip install 'stepguard\[plot\]'"):
        write_html(shown, tmp_path / "a.html")

"""The plot as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from report.literals import NAN, Written, step_line, told, troubled_run
from stepguard._errors import ConfigError
from stepguard.report.plot import describe, write_png

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_png_is_written_whole_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    run = troubled_run()
    path = tmp_path / "deep/loss_curve.png"
    before = "matplotlib.pyplot" in sys.modules  # a framework's tests may have brought it
    write_png(describe(told(run), ""), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 10_000
    assert [entry.name for entry in path.parent.iterdir()] == ["loss_curve.png"]
    assert ("matplotlib.pyplot" in sys.modules) == before


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
    write_png(describe(told(Written(steps=steps)), ""), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = describe(told(Written(steps=[step_line(0)])), "")
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'stepguard\[plot\]'"):
        write_png(shown, tmp_path / "a.png")

"""The plot of a run: its curves and marks, and the picture of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report import real_runs
from report.literals import NAN, Written, masked_row, step_line, told, troubled_run
from stepguard._errors import ConfigError
from stepguard.report.plot import draw_run, write_png
from stepguard.report.story import read_story

# On a fresh machine matplotlib starts `fc-list` to find the fonts. It does so now, while tests are
# collected, because a test of the quick lane that starts a process fails.
pytest.importorskip("matplotlib.font_manager")


def marks(figure: Any) -> dict[str, list[int]]:
    """The steps that are marked, by the kind of their mark without its number."""
    found = {}
    for collection in figure.axes[0].collections:
        kind, counted, _ = collection.get_label().partition(" (")
        if counted:
            found[kind] = [int(step) for step, _ in collection.get_offsets()]
    return found


def test_run_with_trouble_has_two_panels_and_a_mark_for_each_kind() -> None:
    figure = draw_run(told(troubled_run()), "training loss")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "gradient norm"]
    assert marks(figure) == {
        "update dropped": [48, 49, 50, 51],
        "loss-scale calibration": [0, 1],
    }
    for axes in figure.axes:
        assert axes.lines and all(np.isfinite(line.get_ydata()).all() for line in axes.lines)
    assert [text.get_text() for text in figure.axes[0].texts] == ["SG204 at step 48 (x4)"]


def test_run_without_a_finite_number_has_an_empty_loss_panel_and_nothing_else() -> None:
    run = told(Written(steps=[step_line(0, NAN, lr=[1e-3], grad_norm=None)]))
    (loss,) = draw_run(run, "").axes
    assert [text.get_text() for text in loss.texts] == ["no finite loss"]
    assert marks(draw_run(run, "")) == {"not finite": [0]}
    let_through = Written(steps=[step_line(48, 1.0)], incidents=[masked_row(48, "note")])
    assert marks(draw_run(told(let_through), "")) == {"let through": [48]}


def test_learning_rate_is_shown_only_where_it_changes() -> None:
    steps = [step_line(step, 1.0, lr=[1e-3]) for step in range(3)]
    assert len(draw_run(told(Written(steps=steps)), "").axes) == 1
    steps[1]["lr"] = [2e-3]
    _, rate = draw_run(told(Written(steps=steps)), "").axes
    assert rate.lines[0].get_ydata().tolist() == [1e-3, 2e-3, 1e-3]


@pytest.mark.parametrize(
    ("losses", "scale"),
    [([1.0, 2.0], "log"), ([0.0, 0.0], "linear"), ([-1.0, 1.0, 1e4], "symlog")],
)
def test_scale_falls_back_where_a_logarithm_cannot_show_the_values(
    losses: list[float], scale: str
) -> None:
    steps = [step_line(step, loss) for step, loss in enumerate(losses)]
    assert draw_run(told(Written(steps=steps)), "").axes[0].get_yscale() == scale


@pytest.mark.slow
def test_png_is_written_whole_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep/loss_curve.png"
    before = "matplotlib.pyplot" in sys.modules  # a framework's tests may have brought it
    write_png(draw_run(told(troubled_run()), ""), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 10_000
    assert [entry.name for entry in path.parent.iterdir()] == ["loss_curve.png"]
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'stepguard\[plot\]'"):
        draw_run(told(Written(steps=[step_line(0)])), "")


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = real_runs.rewound(tmp_path_factory.mktemp("plot") / "rewound")
    return draw_run(read_story(folder).latest, "")


def test_dropped_updates_are_never_called_let_through(rewound: Any) -> None:
    marked = marks(rewound)
    assert "let through" not in marked
    assert set(range(30, 34)) < set(marked["update dropped"])
    assert marked["made without a part of the batch"][0] == 20
    assert marked["rewound"] == [40] and 40 in marked["update dropped"]
    places = []
    for collection in rewound.axes[0].collections:
        places += [(float(x), float(y)) for x, y in collection.get_offsets()]
    assert len(set(places)) == len(places), "no mark covers another"


def test_curves_never_run_backwards(rewound: Any) -> None:
    styles = set()
    for axes in rewound.axes:
        for line in axes.lines:
            styles.add(line.get_linestyle())
            assert (np.diff(line.get_xdata()) > 0).all()
    assert styles == {"-", ":"}


def test_curve_of_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    loss = draw_run(read_story(real_runs.restarted(tmp_path)).latest, "").axes[0].lines[0]
    assert loss.get_xdata().tolist() == [*range(5), *range(6, 40)]


@pytest.mark.slow
@pytest.mark.parametrize("losses", [[NAN], [1.0], [-1.0, 0.0, 2.0], [0.0, 0.0], [None]])
def test_odd_runs_are_drawn(tmp_path: Path, losses: list[float | None]) -> None:
    steps = [step_line(n, loss, lr=[1e-4 * (n + 1)]) for n, loss in enumerate(losses)]
    steps[0]["grad_norm"] = 1.0 if len(losses) > 1 else None
    write_png(draw_run(told(Written(steps=steps)), ""), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000

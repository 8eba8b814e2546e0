"""What report, plot, compare, live and doctor say of runs that were rewound, restarted or repeated.

Each was told wrongly once: "let through (4)" for dropped updates, curves that run backwards, events
sorted by step number, incidents of a run before in the same folder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from report import real_runs
from report.test_plot_png import marks
from stepguard.cli.app import app
from stepguard.report.plot import draw_run
from stepguard.report.run_report import render_terminal
from stepguard.report.story import Story, read_story
from stepguard.report.summary import compare, summarize


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return read_story(real_runs.rewound(tmp_path_factory.mktemp("true") / "rewound"))


def test_dropped_updates_are_never_called_let_through(rewound: Story) -> None:
    marked = marks(draw_run(rewound.latest, ""))
    assert "let through" not in marked
    assert set(range(30, 34)) < set(marked["update dropped"])
    assert marked["made without a part of the batch"][0] == 20
    assert marked["rewound"] == [40]


def test_curves_never_run_backwards(rewound: Story) -> None:
    styles = set()
    for axes in draw_run(rewound.latest, "").axes:
        for line in axes.lines:
            styles.add(line.get_linestyle())
            assert (np.diff(line.get_xdata()) > 0).all()
    assert styles == {"-", ":"}


def test_events_are_in_the_order_of_time(rewound: Story) -> None:
    events = summarize(rewound.latest).timeline
    texts = [event.text for event in events]
    back = next(place for place, text in enumerate(texts) if "rewound to step" in text)
    assert events[back].step == 40
    assert "no step was committed after" not in " ".join(texts)
    assert texts[-1] == "the guard was closed"


def test_steps_that_no_longer_count_are_said(rewound: Story) -> None:
    screen = render_terminal(summarize(rewound.latest, rewound), width=100)
    assert "of them no longer count: 1 rewind" in screen
    assert "continued without sample 3" in screen
    assert "longest stretch 4 in a row" in screen


def test_fixed_run_does_not_show_the_incidents_of_the_run_before(tmp_path: Path) -> None:
    folder = real_runs.fixed(tmp_path / "run")
    now = CliRunner().invoke(app, ["report", str(folder)])
    assert now.exit_code == 0
    assert "20 seen, 20 committed, 0 skipped" in now.stdout and "SG" not in now.stdout
    assert "used for 2 runs, this is number 2" in now.stdout
    before = CliRunner().invoke(app, ["report", str(folder), "--run", "1"])
    assert "SG101" in before.stdout and "this is number 1" in before.stdout
    third = CliRunner().invoke(app, ["report", str(folder), "--run", "3"])
    assert third.exit_code == 2 and "holds 2" in third.stderr
    live = CliRunner().invoke(app, ["live", str(folder), "--once", "--stage", "0-19: incidents=0"])
    assert live.exit_code == 0 and "healthy" in live.stdout
    doctor = CliRunner().invoke(app, ["doctor", str(folder)])
    assert "20 steps, 0 incidents" in doctor.stdout and "SG" not in doctor.stdout


def test_doctor_reads_the_journal_of_the_run(tmp_path: Path) -> None:
    folder = real_runs.rewound(tmp_path / "run")
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert "journal  warning" in done.stdout and "stepguard report" in done.stdout


def test_restart_is_an_event_and_the_line_goes_on(tmp_path: Path) -> None:
    story = read_story(real_runs.restarted(tmp_path / "run"))
    summary = summarize(story.latest, story)
    assert (summary.restarts, summary.left) == (1, 6)
    texts = [event.text for event in summary.timeline]
    assert any(text.startswith("started again at step 24; 6 steps of before") for text in texts)
    loss = draw_run(story.latest, "").axes[0].lines[0]
    assert loss.get_xdata().tolist() == list(range(5)) + list(range(6, 40))


def test_part_that_was_left_out_is_named_and_counted_from_1(tmp_path: Path) -> None:
    story = read_story(real_runs.in_part(tmp_path / "run"))
    screen = render_terminal(summarize(story.latest, story), width=100)
    assert "loss is nan in micro-batch 2 of 4" in screen
    assert "continued without micro-batch 2 of 4" in screen
    assert "20 seen, 20 committed, 0 skipped" in screen


def test_runs_are_compared_by_the_steps_that_count(rewound: Story, tmp_path: Path) -> None:
    healthy = read_story(real_runs.fixed(tmp_path / "run")).latest
    rows = {row.aspect: row for row in compare(rewound.latest, healthy).rows}
    assert "left behind" in rows["steps"].first and "left behind" not in rows["steps"].second
    assert "rewound 1" in rows["what was done"].first

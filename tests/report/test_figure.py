"""The description of a plot, before it is drawn."""

from __future__ import annotations

from pathlib import Path

from report import real_runs
from report.literals import NAN, Written, step_line, told, troubled_run
from stepguard.report.plot import describe, replace_file
from stepguard.report.story import read_story


def test_run_with_trouble_has_two_panels_and_a_mark_for_each_kind() -> None:
    run = troubled_run()
    shown = describe(told(run), "")
    assert shown.title == "training loss"
    assert [panel.name for panel in shown.panels] == ["loss", "gradient norm"]
    assert [(marks.kind, marks.total) for marks in shown.marks] == [
        ("update dropped", 4),
        ("loss-scale calibration", 2),
    ]
    assert shown.spans == [(48, 51)]


def test_no_mark_covers_another(tmp_path: Path) -> None:
    """The step that was rewound from is one whose update was dropped."""
    shown = describe(read_story(real_runs.rewound(tmp_path / "run")).latest, "")
    rows = {marks.kind: marks for marks in shown.marks}
    assert set(rows["rewound"].steps) & set(rows["update dropped"].steps)
    assert rows["rewound"].row == rows["update dropped"].row + 1
    assert [marks.row for marks in describe(told(troubled_run()), "").marks] == [0, 0]


def test_run_without_a_finite_number_has_an_empty_loss_panel_and_nothing_else() -> None:
    shown = describe(told(Written(steps=[step_line(0, NAN, lr=[1e-3], grad_norm=None)])), "")
    assert [(panel.name, panel.lines) for panel in shown.panels] == [("loss", [])]
    assert shown.rate is None and [marks.kind for marks in shown.marks] == ["not finite"]


def test_learning_rate_is_shown_only_where_it_changes() -> None:
    steps = [step_line(step, 1.0, lr=[1e-3]) for step in range(3)]
    assert describe(told(Written(steps=steps)), "").rate is None
    steps[1]["lr"] = [2e-3]
    assert describe(told(Written(steps=steps)), "").rate == ([0, 1, 2], [1e-3, 2e-3, 1e-3])


def test_file_is_replaced_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "deep/a.txt"
    for content in (b"old", b"new"):
        replace_file(path, content)
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]

"""`stepguard plot RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.journals import run_stepguard, write_run
from stepguard.cli.app import app
from stepguard.journal import Journal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.mark.slow
def test_picture_lies_inside_the_run_by_default(run: Path) -> None:
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["plot", str(run)])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"wrote {run / 'loss_curve.png'}\n"
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--format", "html"], ["-o", "{run}/loss_curve.html"]])
def test_page_by_format_or_by_ending(run: Path, words: list[str]) -> None:
    done = CliRunner().invoke(app, ["plot", str(run), *(word.format(run=run) for word in words)])
    assert done.exit_code == 0, done.output
    assert "<html>" in (run / "loss_curve.html").read_text(encoding="utf-8")[:200]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "a.png", "--format", "html"], "--format html does not fit --out a.png"),
        (["--out", "a.svg"], "does not end with .png or .html"),
    ],
)
def test_contradicting_options_are_one_line(run: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plot", str(run), *words])
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_run_without_a_step_is_one_line(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    done = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert done.exit_code == 2 and "nothing to draw" in done.stderr


@pytest.mark.parametrize(("library", "kind"), [("matplotlib", "png"), ("plotly", "html")])
def test_missing_library_is_one_line_that_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, library: str, kind: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    done = CliRunner().invoke(app, ["plot", str(run), "--format", kind])
    assert done.exit_code == 2
    assert "stepguard[plot]" in done.stderr and done.stderr.count("\n") == 1


def test_plot_works_in_a_process_of_its_own_without_torch(run: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_stepguard("plot", str(run), PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "matplotlib.figure" in imported and "torch" not in imported

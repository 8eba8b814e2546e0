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


@pytest.mark.parametrize("name", ["a.svg", "a.html"])
def test_another_ending_is_one_line_that_names_the_page(run: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["plot", str(run), "--out", name])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert f"--out {name} does not end with .png; for a web page: stepguard report --html" in (
        done.stderr
    )


@pytest.mark.slow
def test_run_without_a_step_is_one_line(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    done = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert done.exit_code == 2 and "nothing to draw" in done.stderr


def test_missing_library_is_one_line_that_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["plot", str(run)])
    assert done.exit_code == 2
    assert "stepguard[plot]" in done.stderr and done.stderr.count("\n") == 1


def test_plot_works_in_a_process_of_its_own_without_torch(run: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_stepguard("plot", str(run), PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "matplotlib.figure" in imported and "torch" not in imported

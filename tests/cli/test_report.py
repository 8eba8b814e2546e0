"""`stepguard report RUN`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.journals import run_stepguard, write_run
from stepguard.cli.app import app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_report_shows_the_incident(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    for text in (
        "12 seen, 11 committed, 1 skipped",
        "SG204",
        "model.py:88",
        "1.00e-04",
        "clip_norm=1",
    ):
        assert text in done.stdout


def test_journal_file_itself_can_be_given(run: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(run / "journal.jsonl")]).exit_code == 0


@pytest.mark.parametrize("setting", [{}, {"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}])
def test_piped_report_has_no_ansi(run: Path, setting: dict[str, str]) -> None:
    done = run_stepguard("report", str(run), **setting)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and done.stderr == ""


def test_report_for_an_ascii_stream_is_ascii(run: Path) -> None:
    done = run_stepguard("report", str(run), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_json_is_one_object(run: Path) -> None:
    done = run_stepguard("report", str(run), "--json")
    assert json.loads(done.stdout)["first_bad"] == 8


def test_markdown_goes_to_a_file_or_to_stdout(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.md"
    assert CliRunner().invoke(app, ["report", str(run), "--markdown", str(page)]).exit_code == 0
    assert (
        page.read_text(encoding="utf-8")
        == CliRunner().invoke(app, ["report", str(run), "--markdown", "-"]).stdout
    )
    assert "SG204" in page.read_text(encoding="utf-8")


def test_torn_line_is_warned_of(run: Path) -> None:
    with (run / "journal.jsonl").open("a") as file:
        file.write('{"v":1,"type":"st')
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0
    assert "warning: 1 line of the journal could not be read" in done.stdout


def test_folder_of_runs_is_listed(run: Path) -> None:
    write_run(run.parent / "group" / "other")
    done = CliRunner().invoke(app, ["report", str(run.parent)])
    assert done.exit_code == 0, done.output
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["run", "state", "steps", "loss", "incidents", "last"]
    assert [row.split()[0] for row in rows] == ["group/other", "run"]
    listed = CliRunner().invoke(app, ["report", str(run.parent), "--json"])
    assert [one["incidents"] for one in json.loads(listed.stdout)["runs"]] == ["1", "1"]


def test_folder_without_a_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "holds no run; give a run directory" in done.stderr


def test_missing_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run_stepguard("report", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stepguard: error: ") and done.stderr.count("\n") == 1
    assert "give a run directory" in done.stderr


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize("text", ["import torch\nmodel = 1\n", "", '{"a": 1}\n[]\n'])
def test_file_that_is_no_journal_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str, command: str
) -> None:
    (tmp_path / "vit.py").write_text(text)
    done = CliRunner().invoke(app, [command, str(tmp_path / "vit.py")])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "is not a journal of stepguard" in done.stderr


def test_journal_of_a_newer_version_is_one_line(run: Path) -> None:
    (run / "journal.jsonl").write_text('{"v":999,"type":"step"}\n')
    done = run_stepguard("report", str(run))
    assert done.returncode == 2
    assert "schema 999" in done.stderr and done.stderr.count("\n") == 1


def test_rank_without_a_journal_is_named(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), "--rank", "3"])
    assert done.exit_code == 2 and "journal.rank3.jsonl does not exist" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "--markdown", "x.md"], "--json and --markdown exclude each other"),
        (
            ["--markdown", "/no/such/folder/x.md"],
            "/no/such/folder/x.md cannot be written: No such file",
        ),
    ],
)
def test_contradictions_and_bad_paths_are_one_line(
    run: Path, words: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, ["report", str(run), *words])
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_reader_that_stops_early_is_no_traceback(run: Path) -> None:
    quoted = f"'{sys.executable}' -m stepguard report '{run}' | head -n 1"
    done = subprocess.run(["sh", "-c", quoted], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr

"""`stepguard compare` and `stepguard live`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.journals import run_stepguard, write_run
from stepguard.cli.app import app
from stepguard.cli.runs import follow
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.story import StoryReader


def _healthy(folder: Path, steps: int = 12) -> Path:
    journal = Journal(folder)
    journal.write("run", {"stepguard": "0.1.0"})
    for step in range(steps):
        journal.step(
            Reading(step=step, loss=2.0 - step / 10, grad_norm=0.5, lr=(1e-4,)), committed=True
        )
    journal.close()
    return folder


def test_compare_prints_one_table_of_both_runs(tmp_path: Path) -> None:
    done = run_stepguard("compare", str(write_run(tmp_path / "a")), str(_healthy(tmp_path / "b")))
    assert done.returncode == 0, done.stderr
    assert "11 of 12 committed" in done.stdout
    assert "12 of 12 committed" in done.stdout
    assert "SG204" in done.stdout


def test_compare_as_json_is_one_object(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a"))
    done = CliRunner().invoke(app, ["compare", run, run, "--json"])
    assert {row["better"] for row in json.loads(done.stdout)["rows"]} <= {"same", "unknown"}


def test_compare_of_a_missing_run_is_one_line_with_exit_code_two(tmp_path: Path) -> None:
    done = run_stepguard("compare", str(tmp_path / "none"), str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "does not exist" in done.stderr


def test_live_gives_its_verdict_as_exit_code(tmp_path: Path) -> None:
    run = str(_healthy(tmp_path / "run"))
    healthy = CliRunner().invoke(
        app, ["live", run, "--steps", "12", "--stage", "0-11: loss<1, incidents=0"]
    )
    assert healthy.exit_code == 0, healthy.output
    assert "healthy" in healthy.stdout
    failed = CliRunner().invoke(app, ["live", run, "--steps", "12", "--stage", "0-11: loss<0.5"])
    assert failed.exit_code == 1
    assert "unhealthy" in failed.stdout


def test_live_once_shows_a_run_that_has_not_made_a_step(tmp_path: Path) -> None:
    run = _healthy(tmp_path / "run", steps=0)
    done = CliRunner().invoke(app, ["live", str(run), "--once", "--json"])
    assert done.exit_code == 0
    expected = {"verdict": "waiting", "steps": 0, "incidents": 0, "concerns": [], "stages": []}
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("name", ["typo", "typo/journal.jsonl", "."])
def test_live_once_of_what_is_no_run_is_exit_code_2(tmp_path: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["live", str(tmp_path / name), "--once"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "does not exist" in done.stderr


def test_live_of_a_name_that_does_not_exist_is_an_error_and_does_not_wait(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["live", str(tmp_path / "typo")])
    assert done.exit_code == 2 and "does not exist; give a run directory" in done.stderr


def test_live_of_a_file_that_is_no_journal_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "vit.py").write_text("import torch\n")
    done = CliRunner().invoke(app, ["live", str(tmp_path / "vit.py"), "--once"])
    assert done.exit_code == 2 and "is not a journal of stepguard" in done.stderr
    assert CliRunner().invoke(app, ["live", "/dev/zero", "--once"]).exit_code == 2


def test_live_ends_with_a_newline_and_says_which_value_there_is_not(tmp_path: Path) -> None:
    run = _healthy(tmp_path / "run")
    done = run_stepguard("live", str(run), "--once", "--stage", "0-10: nosuch<3")
    assert done.returncode == 1 and done.stdout.endswith("unhealthy\n")
    assert "no step of this run has a value named 'nosuch'; it has loss" in " ".join(
        done.stdout.split()
    )


def test_live_follows_lines_that_come_later_and_takes_no_half_line(tmp_path: Path) -> None:
    run = _healthy(tmp_path / "run", steps=3)
    path = run / "journal.jsonl"
    line = json.dumps({"v": 1, "type": "step", "step": 3, "loss": 1.0, "committed": True})
    pieces = [line[:10], line[10:] + "\n"]
    seen: list[int] = []
    follower = StoryReader(run)

    def wait(seconds: float) -> None:
        seen.append(len(follower.story().latest.steps))
        with path.open("a") as file:
            file.write(pieces.pop(0))

    assert follow(follower, [], 4, once=False, quiet=True, wait=wait).verdict == "healthy"
    assert seen == [3, 3]
    assert follower.story().torn == 0


def test_live_ends_quietly_on_ctrl_c(tmp_path: Path) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    assert (
        follow(
            StoryReader(tmp_path / "run"), [], None, once=False, quiet=True, wait=interrupted
        ).verdict
        == "waiting"
    )


def test_a_stage_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    done = run_stepguard("live", str(tmp_path), "--stage", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr

"""`stepguard doctor DIR`: exit codes, the text, and the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from preflight.doctored import TITLES, project_in
from stepguard.cli.app import app
from verification import saved


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with project_in(tmp_path) as folder:
        yield folder


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words])


def test_folder_with_nothing_to_examine_is_exit_code_2(project: Path) -> None:
    done = invoke("run")
    assert (
        done.exit_code == 2
        and "nothing to examine in run" in done.stderr
        and "--build" in done.stderr
    )


def test_journal_of_a_run_in_trouble_is_read_and_its_report_named(project: Path) -> None:
    from cli.journals import write_run

    write_run(project / "run")
    done = invoke("run")
    assert done.exit_code == 0, done.output
    assert "its journal: waiting, 1 incident in 12 steps" in done.stdout
    assert "$ stepguard report run" in done.stdout
    assert "recommendations  warning" in done.stdout


def test_poisoned_run_says_what_to_resume_and_what_to_move(project: Path) -> None:
    everything = saved.trained()
    for step in (10, 20, 30):
        saved.save_zip(Path(f"run/step_{step}.pt"), {**everything, "global_step": step})
    poisoned = {**everything["state_dict"], "outer.bias": torch.tensor([float("nan")])}
    saved.save_zip(
        Path("run/step_30.pt"), {**everything, "state_dict": poisoned, "global_step": 30}
    )
    done = invoke("run")
    assert done.exit_code == 4
    assert "outer.bias" in done.stdout
    assert "resume from run/step_20.pt (step 20)" in done.stdout
    assert "$ stepguard quarantine run" in done.stdout
    found = json.loads(invoke("run", "--json").stdout)
    assert found["status"] == "corrupt"
    assert found["sections"][5]["commands"] == ["stepguard quarantine run"]


def test_configuration_that_the_checkpoint_overrides_fails(project: Path) -> None:
    saved.save_zip(Path("run/a.pt"), saved.trained())
    Path("config.py").write_text("LEARNING_RATE = 1e-4\nBATCH_SIZE = 32\n")
    done = invoke("run", "--config", "config.py")
    assert done.exit_code == 5
    assert "max_lr=0.0005 comes back" in done.stdout
    assert "configured is LEARNING_RATE=0.0001" in done.stdout


def test_code_outside_the_project_is_not_imported(project: Path) -> None:
    done = invoke("run", "--build", "json:loads")
    assert done.exit_code == 2 and "outside" in done.stderr


def test_json_has_all_sections(project: Path) -> None:
    saved.save_zip(project / "run" / "model.pt", {"w.weight": torch.rand(4, 4)})
    done = invoke("run", "--json")
    data = json.loads(done.stdout)
    assert [section["title"] for section in data["sections"]] == TITLES and data["status"] == "fine"

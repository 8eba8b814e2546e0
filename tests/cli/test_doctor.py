"""`stepguard doctor DIR`: exit codes, the text, and the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import stepguard
from check import saved
from check.asking import project_in
from stepguard.cli.app import app


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
    assert "12 steps, 1 incident; it has not ended" in done.stdout
    assert "$ stepguard report run" in done.stdout
    assert "journal  warning" in done.stdout and "not checked: give" not in done.stdout


def test_a_run_is_examined_by_what_its_folder_holds(project: Path) -> None:
    """Journal, capsules and checkpoints, without a word on what was not given."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = stepguard.GuardConfig(
        run_dir="run",
        checkpoint_every=5,
        terminal="quiet",
        snapshots=stepguard.Snapshots(every=1, probation=1),
    )

    def loss_fn(divisor: torch.Tensor) -> torch.Tensor:
        return model(torch.ones(2, 4)).square().mean() / divisor

    with stepguard.Guard(model, optimizer, config=settings) as guard:
        for step in range(20):
            guard.step(loss_fn, torch.tensor(0.0 if step in (7, 12) else 1.0))
    broken = sorted(Path("run/incidents").glob("*/capsule"))[0] / "tensors.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    done = invoke("run", "--json")
    assert done.exit_code == 0, done.output
    found = {part["title"]: part for part in json.loads(done.stdout)["sections"]}
    assert list(found) == ["checkpoints", "journal", "capsules", "recommendations"]
    text = "\n".join(found["journal"]["lines"])
    assert "20 steps, 2 incidents" in text and "SG201" in text and "2 times, steps 7 to 12" in text
    assert "SGD, learning rate 0.1" in text and "checkpoint_every=5" in text
    assert found["capsules"]["lines"][0] == "2 bad steps kept by all runs here, 1 can be replayed"
    assert "cannot be read" in found["capsules"]["lines"][1]
    assert found["capsules"]["commands"][0].startswith("stepguard replay run/incidents/00000012")
    assert found["checkpoints"]["status"] == "fine"
    assert "not checked" not in done.stdout and "alpha" not in done.stdout


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
    assert found["sections"][-1]["commands"] == ["stepguard quarantine run"]


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

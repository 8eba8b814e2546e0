"""`stepguard doctor DIR`: six sections, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stepguard.cli.app import app
from stepguard.cli.examination import examine
from stepguard.records.examination import Examination
from verification import saved

PROJECT = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, alpha):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.alpha_res = nn.Parameter(torch.tensor(alpha))

    def forward(self, x):
        return self.alpha_res * self.line(x)


def model():
    return Gate(0.01)


def with_inputs():
    return Gate(0.01), torch.ones(2, 4)


def with_large_gate():
    return Gate(3.0), (torch.ones(2, 4),)


def with_nan():
    net = Gate(0.01)
    with torch.no_grad():
        net.line.weight[0, 0] = float("nan")
    return net, {"x": torch.ones(2, 4)}


def broken():
    raise RuntimeError("no such dataset")


def wrong():
    return 3
"""
TITLES = [
    "configuration",
    "checkpoints",
    "fresh model",
    "forward pass",
    "watched values",
    "recommendations",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "doctored_project.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def _forget_the_project() -> Any:
    import sys

    yield
    sys.modules.pop("doctored_project", None)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words])


def statuses(found: Examination) -> dict[str, str]:
    return {section.title: section.status for section in found.sections}


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


def test_sections_without_input_say_what_to_give(project: Path) -> None:
    found = examine(Path("run"), config=None, build=None, watch=["*alpha*"])
    assert [section.title for section in found.sections] == TITLES
    assert set(list(statuses(found).values())[:5]) == {"not checked"}
    assert (
        "give --build" in found.sections[2].lines[0]
        and "give --config" in found.sections[0].lines[0]
    )
    assert found.status == "fine"


def test_healthy_run_is_fine_in_all_sections(project: Path) -> None:
    everything = saved.trained()
    everything["state_dict"]["gate.alpha_pre"] = torch.tensor(0.02)
    saved.save_zip(Path("run/step_10.pt"), everything)
    Path("config.yaml").write_text("lr: 5.0e-4\nbatch_size: 32\n")
    found = examine(
        Path("run"),
        config=Path("config.yaml"),
        build="doctored_project:with_inputs",
        watch=["*alpha*"],
    )
    assert set(statuses(found).values()) <= {"fine", "warning"}, found
    assert "batch_size = 32" in found.sections[0].lines[0]
    assert any("alpha_pre = 0.02" in line for line in found.sections[4].lines)
    assert any("resume from run/step_10.pt" in line for line in found.sections[5].lines)


def test_poisoned_run_says_what_to_resume_and_what_to_move(project: Path) -> None:
    everything = saved.trained()
    for step in (10, 20, 30):
        saved.save_zip(Path(f"run/step_{step}.pt"), {**everything, "global_step": step})
    poisoned = {**everything["state_dict"], "outer.bias": torch.tensor([float("nan")])}
    saved.save_zip(
        Path("run/step_30.pt"), {**everything, "state_dict": poisoned, "global_step": 30}
    )
    found = examine(Path("run"), config=None, build=None, watch=["*alpha*"])
    assert found.status == "corrupt"
    advice = found.sections[5]
    assert advice.commands == ("stepguard quarantine run",)
    assert any("run/step_20.pt (step 20)" in line for line in advice.lines)
    done = invoke("run")
    assert (
        done.exit_code == 4
        and "outer.bias" in done.stdout
        and "stepguard quarantine run" in done.stdout
    )


def test_nothing_left_means_a_fresh_start(project: Path) -> None:
    saved.save_zip(Path("run/a.pt"), {"w": torch.tensor([float("nan")])})
    found = examine(Path("run"), config=None, build=None, watch=["*alpha*"])
    assert any(line.startswith("start afresh") for line in found.sections[5].lines)


def test_configuration_that_the_checkpoint_overrides_fails(project: Path) -> None:
    saved.save_zip(Path("run/a.pt"), saved.trained())
    Path("config.py").write_text("LEARNING_RATE = 1e-4\nBATCH_SIZE = 32\n")
    done = invoke("run", "--config", "config.py")
    assert done.exit_code == 5 and "OneCycleLR" in done.stdout and "0.0005" in done.stdout


def test_rate_that_yaml_takes_for_a_text_is_a_warning(project: Path) -> None:
    Path("c.yaml").write_text("lr: 1e-4x\n")
    assert (
        statuses(examine(Path("run"), config=Path("c.yaml"), build=None, watch=[]))["configuration"]
        == "failed"
    )
    Path("c.yaml").write_text('lr: "1e-4"\n')
    assert (
        statuses(examine(Path("run"), config=Path("c.yaml"), build=None, watch=[]))["configuration"]
        == "warning"
    )


@pytest.mark.parametrize(
    ("function", "model", "forward", "watched"),
    [
        ("model", "fine", "not checked", "fine"),
        ("with_inputs", "fine", "fine", "fine"),
        ("with_large_gate", "fine", "fine", "warning"),
        ("with_nan", "failed", "failed", "fine"),
        ("broken", "failed", "not checked", "not checked"),
        ("wrong", "failed", "not checked", "not checked"),
    ],
)
def test_fresh_model_is_built_and_called(
    project: Path, function: str, model: str, forward: str, watched: str
) -> None:
    found = statuses(
        examine(Path("run"), config=None, build=f"doctored_project:{function}", watch=["*alpha*"])
    )
    assert (found["fresh model"], found["forward pass"], found["watched values"]) == (
        model,
        forward,
        watched,
    )


def test_forward_pass_names_the_first_bad_module(project: Path) -> None:
    found = examine(Path("run"), config=None, build="doctored_project:with_nan", watch=[])
    assert "line" in found.sections[3].lines[0]


def test_code_outside_the_project_is_not_imported(project: Path) -> None:
    done = invoke("run", "--build", "json:loads")
    assert done.exit_code == 2 and "outside" in done.stderr


def test_json_has_all_sections(project: Path) -> None:
    saved.save_zip(project / "run" / "model.pt", {"w.weight": torch.rand(4, 4)})
    done = invoke("run", "--json")
    data = json.loads(done.stdout)
    assert [section["title"] for section in data["sections"]] == TITLES and data["status"] == "fine"

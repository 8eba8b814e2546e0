"""The sections of `stepguard doctor`, each from the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from preflight.doctored import project_in
from stepguard.check.doctor import best_of, examine
from stepguard.check.verify import check_path
from stepguard.records.incident import Examination, Section
from stepguard.report.checks import journal_section
from verification import saved


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with project_in(tmp_path) as folder:
        yield folder


def statuses(found: Examination) -> dict[str, str]:
    return {section.title: section.status for section in found.sections}


def section(found: Examination, title: str) -> Section:
    return next(part for part in found.sections if part.title == title)


def test_what_was_not_given_is_not_a_section(project: Path) -> None:
    found = examine(Path("run"), config=None, build=None, watch=[])
    assert statuses(found) == {"checkpoints": "not checked", "recommendations": "fine"}
    assert found.sections[-1].lines == ("there is no checkpoint to resume from",)
    watched = examine(Path("run"), config=None, build=None, watch=["*alpha*"])
    assert "no tensor is named *alpha*" in section(watched, "watched values").lines[0]


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
    assert "batch_size = 32" in section(found, "configuration").lines[0]
    assert any("alpha_pre = 0.02" in line for line in section(found, "watched values").lines)
    assert any("resume from run/step_10.pt" in line for line in found.sections[-1].lines)


def test_nothing_left_means_a_fresh_start(project: Path) -> None:
    saved.save_zip(Path("run/a.pt"), {"w": torch.tensor([float("nan")])})
    found = examine(Path("run"), config=None, build=None, watch=["*alpha*"])
    assert any(line.startswith("start afresh") for line in found.sections[-1].lines)


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
    assert "line" in section(found, "forward pass").lines[0]


def test_model_of_any_build_function_of_check_is_taken(project: Path) -> None:
    found = examine(Path("run"), config=None, build="doctored_project:subject", watch=[])
    assert statuses(found)["forward pass"] == "fine"


def test_values_that_no_run_can_use_fail_the_configuration(project: Path) -> None:
    Path("c.json").write_text('{"lr": 1e-4, "batch_size": 0}')
    found = examine(Path("run"), config=Path("c.json"), build=None, watch=[]).sections[0]
    assert found.status == "failed"
    assert "batch_size=0 must be above 0" in found.lines


def test_newest_good_checkpoint_is_the_best(project: Path) -> None:
    saved.save_zip(Path("run/a.pt"), {"w": torch.ones(2), "global_step": 20})
    saved.save_zip(Path("run/b.pt"), {"w": torch.ones(2), "global_step": 3})
    saved.save_zip(Path("run/c.pt"), {"w": torch.tensor([torch.nan]), "global_step": 30})
    best = best_of(check_path(Path("run")))
    assert best is not None and best.path == "run/a.pt"


def test_journal_without_a_line_of_stepguard_is_a_warning(project: Path) -> None:
    Path("run/journal.jsonl").write_text("rubbish\n")
    found = journal_section(Path("run"))
    assert found is not None and found.status == "warning"
    assert "0 steps, 0 incidents" in found.lines[0] and "1 line cannot be read" in found.lines[0]

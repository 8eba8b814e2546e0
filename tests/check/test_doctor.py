"""`stepguard doctor`: the sections of an examination, each from the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from check import saved
from check.asking import project_in
from stepguard import ConfigError
from stepguard.check.doctor import best_of, examine
from stepguard.check.verify import check_path
from stepguard.records.incident import Examination, Section
from stepguard.report.checks import journal_section
from stepguard.state.capsule import importable

RUN = Path("run")


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> Iterator[None]:
    with project_in(tmp_path):
        yield


def examined(*watch: str, config: str | None = None, build: str | None = None) -> Examination:
    return examine(
        RUN,
        config=None if config is None else Path(config),
        build=None if build is None else f"doctored_project:{build}",
        watch=watch,
    )


def section(found: Examination, title: str) -> Section:
    return next(part for part in found.sections if part.title == title)


def test_what_was_not_given_is_not_a_section() -> None:
    found = examined()
    assert {part.title: part.status for part in found.sections} == {
        "checkpoints": "not checked",
        "recommendations": "fine",
    }
    assert found.sections[-1].lines == ("there is no checkpoint to resume from",)
    watched = section(examined("*alpha*"), "watched values")
    assert "no tensor is named *alpha*" in watched.lines[0]


def test_healthy_run_is_fine_in_all_sections() -> None:
    everything = saved.trained()
    everything["state_dict"]["gate.alpha_pre"] = torch.tensor(0.02)
    saved.save_zip(RUN / "step_10.pt", everything)
    Path("config.yaml").write_text("lr: 5.0e-4\nbatch_size: 32\n")
    found = examined("*alpha*", config="config.yaml", build="with_inputs")
    assert {part.status for part in found.sections} <= {"fine", "warning"}, found
    assert "batch_size = 32" in section(found, "configuration").lines[0]
    assert any("alpha_pre = 0.02" in line for line in section(found, "watched values").lines)
    assert any("resume from run/step_10.pt" in line for line in found.sections[-1].lines)


def test_nothing_left_means_a_fresh_start() -> None:
    saved.save_zip(RUN / "a.pt", {"w": torch.tensor([float("nan")])})
    assert any(line.startswith("start over") for line in examined().sections[-1].lines)


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        ("lr: 1e-4x\n", "failed", "not a positive number"),
        ('lr: "1e-4"\n', "warning", "numbers in quotes"),
        ("lr: 1.0e-4\nbatch_size: 0\n", "failed", "batch_size=0 must be above 0"),
    ],
)
def test_values_that_no_run_can_use_are_told(text: str, status: str, line: str) -> None:
    Path("c.yaml").write_text(text)
    found = section(examined(config="c.yaml"), "configuration")
    assert found.status == status
    assert any(line in said for said in found.lines)


@pytest.mark.parametrize(
    ("function", "statuses", "values", "forward"),
    [
        (
            "model",
            ("fine", "not checked", "fine"),
            "Gate: 3 tensors of model and optimizer, all finite",
            "(model, inputs)",
        ),
        ("with_inputs", ("fine", "fine", "fine"), "all finite", "one batch: outputs finite"),
        ("subject", ("fine", "fine", "fine"), "all finite", "one batch: outputs finite"),
        ("with_large_gate", ("fine", "fine", "warning"), "all finite", "outputs finite"),
        (
            "with_nan",
            ("failed", "failed", "fine"),
            "param:line.weight (1 of 16 values)",
            "outputs not finite: output; first in line",
        ),
        (
            "with_wrong_inputs",
            ("fine", "failed", "fine"),
            "all finite",
            "the step raised RuntimeError: ",
        ),
        (
            "broken",
            ("failed", "not checked", "not checked"),
            "doctored_project:broken raised RuntimeError: no such dataset",
            "no model",
        ),
        (
            "wrong",
            ("failed", "not checked", "not checked"),
            "doctored_project:wrong returned a int",
            "no model",
        ),
    ],
)
def test_fresh_model_is_built_and_called(
    function: str, statuses: tuple[str, ...], values: str, forward: str
) -> None:
    found = examined("*alpha*", build=function)
    titles = ("fresh model", "forward pass", "watched values")
    assert tuple(section(found, title).status for title in titles) == statuses
    assert values in section(found, "fresh model").lines[0]
    assert forward in section(found, "forward pass").lines[0]


def test_no_hook_stays_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    with importable():
        module = import_module("doctored_project")
    monkeypatch.setattr(module, "model", lambda: (model, torch.ones(2, 4)))
    assert section(examined(build="model"), "forward pass").status == "fine"
    assert not model._forward_hooks


def test_function_that_cannot_be_imported_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        examined(build="nothing")


def test_newest_good_checkpoint_is_the_best() -> None:
    saved.save_zip(RUN / "a.pt", {"w": torch.ones(2), "global_step": 20})
    saved.save_zip(RUN / "b.pt", {"w": torch.ones(2), "global_step": 3})
    saved.save_zip(RUN / "c.pt", {"w": torch.tensor([torch.nan]), "global_step": 30})
    best = best_of(check_path(RUN))
    assert best is not None and best.path == "run/a.pt"


def test_journal_without_a_line_of_stepguard_is_a_warning() -> None:
    (RUN / "journal.jsonl").write_text("rubbish\n")
    found = journal_section(RUN)
    assert found is not None and found.status == "warning"
    assert "0 steps, 0 incidents" in found.lines[0] and "1 line cannot be read" in found.lines[0]

"""A freshly built model: whatever the build function returns or raises becomes two sections."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from preflight.doctored import project_in
from stepguard import ConfigError
from stepguard.check.doctor import examine
from stepguard.records.incident import Section
from stepguard.state.capsule import importable


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> Iterator[None]:
    with project_in(tmp_path):
        yield


def sections(function: str) -> tuple[Section, Section]:
    """About the values of the fresh model, and about its forward pass."""
    found = examine(Path("run"), config=None, build=f"doctored_project:{function}", watch=[])
    values, forward = (s for s in found.sections if s.title in ("fresh model", "forward pass"))
    return values, forward


@pytest.mark.parametrize(
    ("function", "values", "forward"),
    [
        ("model", "Gate: 3 tensors of model and optimizer are finite", "(model, inputs)"),
        ("with_inputs", "are finite", "one batch: outputs finite"),
        ("subject", "are finite", "one batch: outputs finite"),
        (
            "with_nan",
            "param:line.weight (1 of 16 values)",
            "outputs not finite: output; first in line",
        ),
        ("broken", "doctored_project:broken raised RuntimeError: no such dataset", "no model"),
        ("wrong", "doctored_project:wrong returned a int", "no model"),
    ],
)
def test_sections_say_what_was_found(function: str, values: str, forward: str) -> None:
    about_values, about_forward = sections(function)
    assert values in about_values.lines[0]
    assert forward in about_forward.lines[0]


def test_inputs_that_do_not_fit_fail_the_forward_pass() -> None:
    _, section = sections("with_wrong_inputs")
    assert section.status == "failed"
    assert section.lines[0].startswith("the step raised RuntimeError: ")


def test_no_hook_stays_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    with importable():
        module = import_module("doctored_project")
    monkeypatch.setattr(module, "model", lambda: (model, torch.ones(2, 4)))
    assert sections("model")[1].status == "fine"
    assert not model._forward_hooks


def test_function_that_cannot_be_imported_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        sections("nothing")

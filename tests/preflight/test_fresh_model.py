"""A freshly built model: whatever the build function returns or raises becomes two sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from preflight.doctored import project_in
from stepguard import ConfigError
from stepguard.preflight.doctor import FreshModel


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> Iterator[None]:
    with project_in(tmp_path):
        yield


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
    fresh = FreshModel(f"doctored_project:{function}")
    assert values in fresh.values_section().lines[0]
    assert forward in fresh.forward_section().lines[0]


def test_inputs_that_do_not_fit_fail_the_forward_pass() -> None:
    section = FreshModel("doctored_project:with_wrong_inputs").forward_section()
    assert section.status == "failed"
    assert section.lines[0].startswith("the step raised RuntimeError: ")


def test_no_hook_stays_on_the_model() -> None:
    fresh = FreshModel("doctored_project:with_inputs")
    fresh.forward_section()
    assert fresh.model is not None
    assert not any(module._forward_hooks for module in fresh.model.modules())


def test_function_that_cannot_be_imported_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        FreshModel("doctored_project:nothing")

"""`stepguard fix RUN_OR_CAPSULE`: a diff that the bad step was run with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.scripts import write
from stepguard.cli.app import app
from stepguard.run import replay as fixes

PROJECT = '''"""A project."""
from __future__ import annotations

import torch
from torch import nn
import stepguard


def unit(y):
    size = (y * y).sum(-1, keepdim=True)
    length = torch.sqrt(size)
    return y / length


def build():
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: unit(model(x)).sum()


def main():
    model, optimizer, loss_fn = build()
    config = stepguard.GuardConfig(run_dir="run", terminal="quiet", build="fix_project:build")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(6):
            x = torch.randn(5, 4)
            x[2] *= step != 4
            guard.step(loss_fn, x)
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, PROJECT, "fix_project.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fix_project  # type: ignore[import-not-found]

    fix_project.main()
    yield tmp_path / "fix_project.py"
    sys.modules.pop("fix_project", None)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["fix", *words])


def test_diff_is_printed_with_its_proof_and_nothing_is_written(project: Path) -> None:
    before = project.read_text()
    ran = invoke("run")
    assert ran.exit_code == 0, ran.output
    added = [line for line in ran.stdout.splitlines() if line.startswith("+") and line[1] != "+"]
    assert added == [
        "+from stepguard.numerics import safe_div, safe_sqrt",
        "+    length = safe_sqrt(size)",
        "+    return safe_div(y, length)",
    ]
    assert "before, step 4: loss is nan" in ran.stderr
    assert "after, tried on this step: loss and gradients finite (loss" in ran.stderr
    assert project.read_text() == before
    assert ran.stdout.startswith("--- a/fix_project.py\n+++ b/fix_project.py\n@@ ")


def test_change_is_applied_and_then_nothing_is_left_to_fix(project: Path) -> None:
    ran = invoke("run", "--apply", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["code"] == "SG201" and found["applied"] == [str(project)]
    assert found["after"]["loss"] is not None and found["before"]["loss_kind"] == "nan"
    changed = project.read_text()
    assert changed.index("import stepguard\n") < changed.index("from stepguard.numerics")
    assert "return safe_div(y, length)" in changed
    sys.modules.pop("fix_project")
    again = invoke("run")
    assert again.exit_code == 2
    assert "not reproduced" in again.stderr


def test_file_that_has_changed_since_is_left_alone(project: Path) -> None:
    found = fixes.fix("run")
    project.write_text(PROJECT + "\n# mine\n")
    with pytest.raises(fixes.CapsuleError, match="has changed since"):
        found.apply()
    assert project.read_text().endswith("# mine\n")


def test_capsule_of_a_step_without_its_bad_sample_holds_the_weights_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the step is committed before the incident is concluded."""
    root = PROJECT.replace("return y / length", "return length").replace("fix_project", "fix_root")
    write(tmp_path, root, "fix_root.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fix_root  # type: ignore[import-not-found]

    fix_root.main()
    found = fixes.fix("run")
    sys.modules.pop("fix_root", None)
    assert found.incident.reading.loss == found.remedy.loss
    assert "safe_sqrt(size)" in found.diff

"""The checklist's points about code, judged by the source below the current directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from preflight.asking import inside
from stepguard.preflight import Subject, check
from stepguard.preflight.project import read_project

ITEMS = ("checklist.loss_checked", "checklist.norms", "checklist.recovery")


def statuses(folder: Path, source: str) -> tuple[str, ...]:
    (folder / "train.py").write_text(source)
    with inside(folder):
        result = check(Subject(model=nn.Linear(2, 2)), only=ITEMS)
    return tuple(result.outcome(item).status for item in ITEMS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("loss.backward()\noptimizer.step()\n", ("warn", "warn", "warn")),
        ("if torch.isnan(loss):\n    pass\n", ("warn", "warn", "warn")),
        ("if not torch.isfinite(loss):\n    pass\n", ("pass", "warn", "warn")),
        ("norm = clip_grad_norm_(p, 1.0)\n", ("warn", "pass", "warn")),
        ("import stepguard\nguard = stepguard.watch(model, optimizer)\n", ("pass", "pass", "pass")),
    ],
)
def test_points_about_code_follow_the_source(
    tmp_path: Path, source: str, expected: tuple[str, ...]
) -> None:
    assert statuses(tmp_path, source) == expected


def test_installed_and_hidden_source_does_not_count(tmp_path: Path) -> None:
    for folder in ("site-packages", ".hidden", "env"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("isfinite(loss)")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "mine.py").write_text("config.lr\n")
    project = read_project(tmp_path)
    assert (project.files, project.calls) == (1, {})
    assert project.mentions["lr"] == "mine.py:1"

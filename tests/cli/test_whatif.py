"""`stepguard whatif RUN_OR_CAPSULE`: candidates from a capsule, with a build function or script."""

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

PROJECT = """
import torch
from torch import nn
import stepguard


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) / batch["w"].prod()

    return model, optimizer, loss_fn


def clamped(model, optimizer):
    def loss_fn(batch):
        weight = batch["w"].clamp_min(0.5).prod()
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) / weight

    return loss_fn


def main(build_name="whatif_project:build"):
    model, optimizer, loss_fn = build()
    config = stepguard.GuardConfig(run_dir="run", terminal="quiet", build=build_name)
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(40):
            batch = {"x": torch.randn(6, 4), "y": torch.randint(3, (6,)), "w": torch.ones(6)}
            if step == 30:
                batch["w"][3] = 0.0
            guard.step(loss_fn, batch)


if __name__ == "__main__":
    main(None)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, PROJECT, "whatif_project.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("whatif_project", None)


def train() -> None:
    import whatif_project  # type: ignore[import-not-found]

    whatif_project.main()


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["whatif", *words])


def test_run_is_tried_with_its_build_function_and_a_fix_of_ones_own(project: Path) -> None:
    train()
    ran = invoke("run", "--with", "whatif_project:clamped", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["incident"] == "00000030-nonfinite_loss"
    assert found["window"] > 0 and found["held_out"] > 0
    works = [one["name"] for one in found["outcomes"] if one["works"]]
    assert set(works) == {"fix", "leave out", "skip", "own"}
    assert works[0] == "fix"
    table = invoke("run/incidents/00000030-nonfinite_loss", "--plot", "whatif.png")
    assert (project / "whatif.png").read_bytes().startswith(b"\x89PNG")
    assert "Best: the fix for SG201 in your own line." in table.stdout


def test_script_of_the_run_is_enough(project: Path) -> None:
    train()
    ran = invoke("run", "--script", "whatif_project.py")
    assert ran.exit_code == 0, ran.output
    assert "Best: the fix for SG201 in your own line." in ran.stdout
    assert "step 30: loss is inf" in " ".join(ran.stdout.split())


STUBBORN = PROJECT.replace("if step == 30:", "if step >= 30:").replace(
    '/ batch["w"].prod()', '* float("nan" if batch["w"].prod() == 0 else 1)'
)


def test_chain_of_incidents_is_tried_from_its_first(project: Path) -> None:
    """Skipping is no success where the journal shows that the next step fails."""
    write(project, STUBBORN, "whatif_project.py")
    train()
    ran = invoke("run", "--json")
    found = json.loads(ran.stdout)
    assert found["incident"] == "00000030-nonfinite_loss"
    assert found["window"] > 0
    skipped = next(one for one in found["outcomes"] if one["name"] == "skip")
    assert not skipped["works"] and skipped["bad_step"] == 31


def test_failure_of_the_first_steps_is_not_answered_by_skipping(project: Path) -> None:
    write(project, PROJECT.replace("if step == 30:", "if step == 1:"), "whatif_project.py")
    train()
    found = json.loads(invoke("run", "--json").stdout)
    skipped = next(one for one in found["outcomes"] if one["name"] == "skip")
    assert not skipped["works"] and "cannot be tried" in skipped["why_not"]


def test_what_cannot_be_tried_is_one_line(project: Path) -> None:
    assert "is not a capsule" in invoke("nowhere").stderr
    (project / "run" / "incidents").mkdir(parents=True)
    assert "holds no capsule" in invoke("run").stderr
    assert "must look like" in invoke("run", "--with", "fixes").stderr

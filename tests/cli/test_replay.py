"""`stepguard replay`: a capsule of one working copy of a project, run again in another."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.scripts import HEAD, line_of, python, write

PROJECT = (
    HEAD
    + """
import argparse
import numpy as np
import stepguard
from model import Net

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="forward")
parser.add_argument("--width", type=int, default=8)
options = parser.parse_args()


def build():
    torch.manual_seed(0)
    model = Net(options.width, options.fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(batch):
        out = model(batch["x"], batch["scale"])
        if options.fault == "random" and np.random.rand() < 0.3:
            out = out / 0.0  # RANDOM
        return nn.functional.cross_entropy(out, batch["y"])

    return model, optimizer, loss_fn


def main():
    model, optimizer, loss_fn = build()
    np.random.seed(1)
    print("script started")
    config = stepguard.GuardConfig(run_dir="run", terminal="quiet")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(6):
            scale = torch.ones(6)
            if step == 4:
                scale[3] = 0.0
            batch = {"x": torch.randn(6, 4), "y": torch.randint(3, (6,)), "scale": scale}
            guard.step(loss_fn, batch)
    print("script ended")


if __name__ == "__main__":
    main()
"""
)
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width, fault):
        super().__init__()
        self.inner, self.outer, self.fault = nn.Linear(4, width), nn.Linear(width, 3), fault
        self.drop = nn.Dropout(0.2)

    def forward(self, x, scale):
        hidden = self.drop(self.inner(x))
        if self.fault == "forward":
            hidden = hidden * torch.log(scale)[:, None]  # FORWARD
        if self.fault == "backward":
            lengths = (hidden * scale[:, None]).pow(2).sum(1)
            hidden = hidden + lengths.sqrt()[:, None]  # BACKWARD
        return self.outer(hidden)
"""


@pytest.fixture(scope="module", params=["forward", "backward", "random"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The fault, and a run of the project in one folder."""
    folder = tmp_path_factory.mktemp("first")
    write(folder, PROJECT)
    write(folder, MODEL, "model.py")
    done = python(folder, "train.py", "--fault", request.param, "--width", "5")
    assert "script ended" in done.stdout, done.stderr
    return request.param, folder


@pytest.fixture
def copied(written: tuple[str, Path], tmp_path: Path) -> tuple[str, Path, Path]:
    """The fault, another working copy, and the capsule in it."""
    fault, folder = written
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    capsule = sorted(other.glob("run/incidents/*/capsule"))[0]
    return fault, other, capsule.relative_to(other)


def replayed(
    folder: Path, *words: str, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "stepguard", "replay", "--yes", *words, given=given)


def recorded(folder: Path, capsule: Path) -> dict[str, Any]:
    incident: dict[str, Any] = json.loads((folder / capsule.parent / "incident.json").read_text())
    return incident


def test_another_working_copy_gives_the_same_origin(copied: tuple[str, Path, Path]) -> None:
    fault, folder, capsule = copied
    before = sorted(p.relative_to(folder) for p in (folder / "run").rglob("*"))
    done = replayed(folder, str(capsule), "--json")
    assert done.returncode == 0, done.stderr
    first, again = recorded(folder, capsule), json.loads(done.stdout)
    for field in (
        "phase",
        "op",
        "node",
        "module",
        "source",
        "samples",
        "tensor",
        "micro_batch",
        "reproduced",
    ):
        assert again["origin"][field] == first["origin"][field], field
    assert again["findings"][0]["code"] == first["findings"][0]["code"]
    file, text = ("model.py", MODEL) if fault != "random" else ("train.py", PROJECT)
    assert again["origin"]["source"] == f"{file}:{line_of(text, f'# {fault.upper()}')}"
    assert again["origin"]["samples"] == ([] if fault == "random" else [3])
    assert "script started" in done.stderr
    assert "script ended" not in done.stderr
    assert sorted(p.relative_to(folder) for p in (folder / "run").rglob("*")) == before


def one(fault: str) -> Any:
    """Only for the project with this fault."""
    return pytest.mark.parametrize("written", [fault], indirect=True)


@one("forward")
def test_the_panel_goes_to_stdout(copied: tuple[str, Path, Path]) -> None:
    _, folder, capsule = copied
    done = replayed(folder, str(capsule.parent))  # the incident's folder will do
    assert done.returncode == 0, done.stderr
    assert f"aten.log in the model itself at model.py:{line_of(MODEL, '# FORWARD')}" in done.stdout
    assert "the replay shows it again" in done.stdout


@one("forward")
def test_a_run_is_replayed_by_its_last_capsule(copied: tuple[str, Path, Path]) -> None:
    _, folder, capsule = copied
    done = replayed(folder, str(capsule.parents[2]))
    assert done.returncode == 0, done.stderr
    assert "the replay shows it again" in done.stdout


@one("forward")
def test_build_and_script_can_be_given(copied: tuple[str, Path, Path]) -> None:
    _, folder, capsule = copied
    (folder / "train.py").rename(folder / "moved.py")
    gone = replayed(folder, str(capsule))
    assert (gone.returncode, gone.stderr.count("\n")) == (2, 2)
    assert "train.py does not exist here" in gone.stderr
    assert replayed(folder, str(capsule), "--script", "moved.py").returncode == 0
    write(
        folder,
        "import sys\nsys.argv[1:] = ['--width', '5']\nfrom moved import build\n",
        "making.py",
    )
    assert replayed(folder, str(capsule), "--build", "making:build").returncode == 0
    wrong = replayed(folder, str(capsule), "--build", "making")
    assert (wrong.returncode, "package.module:function" in wrong.stderr) == (2, True)


@one("forward")
def test_a_repaired_project_does_not_reproduce_and_the_differences_are_named(
    copied: tuple[str, Path, Path],
) -> None:
    _, folder, capsule = copied
    write(folder, MODEL.replace("torch.log(scale)", "torch.log(scale.clamp_min(1e-6))"), "model.py")
    path = folder / capsule / "capsule.json"
    path.write_text(path.read_text().replace('"torch":"', '"torch":"0.'))
    done = replayed(folder, str(capsule))
    assert done.returncode == 1
    assert "not reproduced: the same step is finite here" in done.stderr
    assert "there, 2." in done.stderr


@one("forward")
def test_outside_the_project_nothing_is_run(copied: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, folder, capsule = copied
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = replayed(elsewhere, str(folder / capsule), "--script", str(folder / "train.py"))
    assert (done.returncode, "outside the current directory" in done.stderr) == (2, True)
    assert "script started" not in done.stdout


@pytest.mark.parametrize("written", ["forward", "backward"], indirect=True)
def test_pdb_stops_in_the_users_frame(copied: tuple[str, Path, Path]) -> None:
    fault, folder, capsule = copied
    done = replayed(
        folder, str(capsule), "--pdb", given="p 'here', scale.tolist()\nup\np sorted(batch)\nq\n"
    )
    assert done.returncode == 0, done.stderr
    assert f"model.py({line_of(MODEL, f'# {fault.upper()}')})forward()" in done.stdout
    assert "('here', [1.0, 1.0, 1.0, 0.0, 1.0, 1.0])" in done.stdout
    assert "['scale', 'x', 'y']" in done.stdout
    assert "script ended" not in done.stdout


@one("forward")
def test_json_and_pdb_exclude_each_other(copied: tuple[str, Path, Path]) -> None:
    _, folder, capsule = copied
    done = replayed(folder, str(capsule), "--pdb", "--json")
    assert (done.returncode, "exclude each other" in done.stderr) == (2, True)


def test_pdb_says_so_where_no_line_of_the_users_is_involved(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
import stepguard
model = nn.Linear(4, 2, bias=False).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8, foreach=False)
config = stepguard.GuardConfig(run_dir="run", terminal="quiet")
with stepguard.Guard(model, optimizer, config=config) as guard:
    loss_fn = lambda x: (model(x) * torch.tensor([1.0, 0.0])).sum().float()
    guard.step(loss_fn, torch.ones(2, 4, dtype=torch.half))
"""
    )
    write(tmp_path, script)
    assert python(tmp_path, "train.py").returncode == 0
    (capsule,) = tmp_path.glob("run/incidents/*/capsule")
    done = replayed(tmp_path, str(capsule), "--pdb", given="q\n")
    assert done.returncode == 0, done.stderr
    assert "no line of yours" in done.stdout
    assert "SG502" in done.stdout


def test_a_script_run_with_python_m_is_run_so_again(tmp_path: Path) -> None:
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, PROJECT.replace("from model import", "from .model import"), "package/train.py")
    write(tmp_path, MODEL, "package/model.py")
    assert "script ended" in python(tmp_path, "-m", "package.train").stdout
    capsule = sorted(tmp_path.glob("run/incidents/*/capsule"))[0]
    done = replayed(tmp_path, str(capsule))
    assert done.returncode == 0, done.stderr
    assert "package/model.py" in done.stdout


def test_the_guard_that_the_capsule_belongs_to_is_waited_for(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
import stepguard
first, second = nn.Linear(2, 2), nn.Linear(3, 3)
config = stepguard.GuardConfig(terminal="quiet")
one = stepguard.Guard(first, torch.optim.SGD(first.parameters(), lr=0.1), config=config)
config = stepguard.GuardConfig(terminal="quiet", run_dir="run")
two = stepguard.Guard(second, torch.optim.SGD(second.parameters(), lr=0.1), config=config)
for step in range(3):
    one.step(lambda x: first(x).sum(), torch.ones(2, 2))
    two.step(lambda x: second(x).log().sum(), torch.ones(2, 3) * 5)  # HERE
"""
    )
    write(tmp_path, script)
    assert python(tmp_path, "train.py").returncode in (0, 3)
    capsule = sorted(tmp_path.glob("run/incidents/*/capsule"))[0]
    done = replayed(tmp_path, str(capsule))
    assert done.returncode == 0, done.stderr
    assert f"train.py:{line_of(script, '# HERE')}" in done.stdout

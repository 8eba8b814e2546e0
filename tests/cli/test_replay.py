"""Commands that run a bad step again: replay in another working copy, fix, and whatif."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.journals import invoke
from cli.scripts import HEAD, Ran, line_of, python, stepguard_in, write
from stepguard.run import replay as fixes

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


def replayed(folder: Path, *words: str, given: str | None = None) -> Ran:
    return stepguard_in(folder, "replay", "--yes", *words, given=given)


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
    done = replayed(folder, str(capsule.parents[2] if fault == "forward" else capsule.parent))
    assert done.returncode == 0 and "the replay shows it again" in done.stdout
    assert again["origin"]["source"] in done.stdout
    assert "script ended" not in done.stdout
    assert "script ended" not in done.stderr
    assert sorted(p.relative_to(folder) for p in (folder / "run").rglob("*")) == before


def one(fault: str) -> Any:
    """Only for the project with this fault."""
    return pytest.mark.parametrize("written", [fault], indirect=True)


@one("forward")
def test_build_and_script_can_be_given(copied: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, folder, capsule = copied
    (folder / "train.py").rename(folder / "moved.py")
    gone = replayed(folder, str(capsule))
    assert (gone.returncode, gone.stderr.count("\n")) == (2, 2)
    assert "train.py does not exist here" in gone.stderr
    assert replayed(folder, str(capsule), "--script", "moved.py").returncode == 0
    write(
        folder,
        "import sys\nbefore, sys.argv = sys.argv, ['making', '--width', '5']\n"
        "from moved import build\nsys.argv = before\n",
        "making.py",
    )
    assert replayed(folder, str(capsule), "--build", "making:build").returncode == 0
    wrong = replayed(folder, str(capsule), "--build", "making")
    assert (wrong.returncode, "package.module:function" in wrong.stderr) == (2, True)
    both = replayed(folder, str(capsule), "--pdb", "--json")
    assert (both.returncode, "exclude each other" in both.stderr) == (2, True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = replayed(elsewhere, str(folder / capsule), "--script", str(folder / "moved.py"))
    assert (done.returncode, "outside the current directory" in done.stderr) == (2, True)
    assert "script started" not in done.stdout


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


@pytest.mark.parametrize("written", ["forward", "backward"], indirect=True)
def test_pdb_stops_in_the_users_frame(copied: tuple[str, Path, Path]) -> None:
    fault, folder, capsule = copied
    typed = "p 'here', scale.tolist()\nup\np sorted(batch)\nq\n"
    words = ("replay", "--yes", str(capsule), "--pdb")
    done = python(folder, "-m", "stepguard", *words, given=typed)
    assert done.returncode == 0, done.stderr
    assert f"model.py({line_of(MODEL, f'# {fault.upper()}')})forward()" in done.stdout
    assert "('here', [1.0, 1.0, 1.0, 0.0, 1.0, 1.0])" in done.stdout
    assert "['scale', 'x', 'y']" in done.stdout
    assert "script ended" not in done.stdout


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


FIX_PROJECT = '''"""A fix_project_file."""
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
def fix_project_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, FIX_PROJECT, "fix_project.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fix_project  # type: ignore[import-not-found]

    fix_project.main()
    yield tmp_path / "fix_project.py"
    sys.modules.pop("fix_project", None)


def fix_of(*words: str) -> Any:
    return invoke("fix", *words)


@pytest.mark.slow
def test_diff_is_printed_with_its_proof_and_nothing_is_written(fix_project_file: Path) -> None:
    before = fix_project_file.read_text()
    ran = fix_of("run")
    assert ran.exit_code == 0, ran.output
    added = [line for line in ran.stdout.splitlines() if line.startswith("+") and line[1] != "+"]
    assert added == [
        "+from stepguard.numerics import safe_div, safe_sqrt",
        "+    length = safe_sqrt(size)",
        "+    return safe_div(y, length)",
    ]
    assert "before, step 4: loss is nan" in ran.stderr
    assert "after, tried on this step: loss and gradients finite (loss" in ran.stderr
    assert fix_project_file.read_text() == before
    assert ran.stdout.startswith("--- a/fix_project.py\n+++ b/fix_project.py\n@@ ")


@pytest.mark.slow
def test_change_is_applied_and_then_nothing_is_left_to_fix(fix_project_file: Path) -> None:
    ran = fix_of("run", "--apply", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["code"] == "SG201" and found["applied"] == [str(fix_project_file)]
    assert found["after"]["loss"] is not None and found["before"]["loss_kind"] == "nan"
    changed = fix_project_file.read_text()
    assert changed.index("import stepguard\n") < changed.index("from stepguard.numerics")
    assert "return safe_div(y, length)" in changed
    sys.modules.pop("fix_project")
    again = fix_of("run")
    assert again.exit_code == 2
    assert "not reproduced" in again.stderr


@pytest.mark.slow
def test_file_that_has_changed_since_is_left_alone(fix_project_file: Path) -> None:
    found = fixes.fix("run")
    fix_project_file.write_text(FIX_PROJECT + "\n# mine\n")
    with pytest.raises(fixes.CapsuleError, match="has changed since"):
        found.apply()
    assert fix_project_file.read_text().endswith("# mine\n")


@pytest.mark.slow
def test_capsule_of_a_step_without_its_bad_sample_holds_the_weights_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the step is committed before the incident is concluded."""
    root = FIX_PROJECT.replace("return y / length", "return length").replace(
        "fix_project", "fix_root"
    )
    write(tmp_path, root, "fix_root.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fix_root  # type: ignore[import-not-found]

    fix_root.main()
    found = fixes.fix("run")
    sys.modules.pop("fix_root", None)
    assert found.incident.reading.loss == found.remedy.loss
    assert "safe_sqrt(size)" in found.diff


WHATIF_PROJECT = """
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
def whatif_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, WHATIF_PROJECT, "whatif_project.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("whatif_project", None)


def train() -> None:
    import whatif_project  # type: ignore[import-not-found]

    whatif_project.main()


def whatif_of(*words: str) -> Any:
    return invoke("whatif", *words)


@pytest.mark.slow
def test_run_is_tried_with_its_build_function_and_a_fix_of_ones_own(whatif_folder: Path) -> None:
    train()
    ran = whatif_of("run", "--with", "whatif_project:clamped", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["incident"] == "00000030-nonfinite_loss"
    assert found["window"] > 0 and found["held_out"] > 0
    works = [one["name"] for one in found["outcomes"] if one["works"]]
    assert set(works) == {"fix", "leave out", "skip", "own"}
    assert works[0] == "fix"
    table = whatif_of("run/incidents/00000030-nonfinite_loss")
    assert "Best: the fix for SG201 in your code." in table.stdout


@pytest.mark.slow
def test_script_of_the_run_is_enough(whatif_folder: Path) -> None:
    train()
    ran = whatif_of("run", "--script", "whatif_project.py")
    assert ran.exit_code == 0, ran.output
    assert "Best: the fix for SG201 in your code." in ran.stdout
    assert "step 30: loss is inf" in " ".join(ran.stdout.split())


STUBBORN = WHATIF_PROJECT.replace("if step == 30:", "if step >= 30:").replace(
    '/ batch["w"].prod()', '* float("nan" if batch["w"].prod() == 0 else 1)'
)


@pytest.mark.slow
def test_chain_of_incidents_is_tried_from_its_first(whatif_folder: Path) -> None:
    """Skipping is no success where the journal shows that the next step fails."""
    write(whatif_folder, STUBBORN, "whatif_project.py")
    train()
    ran = whatif_of("run", "--json")
    found = json.loads(ran.stdout)
    assert found["incident"] == "00000030-nonfinite_loss"
    assert found["window"] > 0
    skipped = next(one for one in found["outcomes"] if one["name"] == "skip")
    assert not skipped["works"] and skipped["bad_step"] == 31


@pytest.mark.slow
def test_replay_of_a_run_takes_its_newest_capsule_and_names_the_others(whatif_folder: Path) -> None:
    write(whatif_folder, STUBBORN, "whatif_project.py")
    train()
    held = sorted(path.name for path in Path("run/incidents").iterdir())
    assert len(held) > 1
    ran = invoke("replay", "run", "--json")
    assert f"/incidents/{held[-1]}/capsule" in json.loads(ran.stdout)["capsule"]
    assert ran.stderr.splitlines()[0] == (
        f"stepguard: replaying run/incidents/{held[-1]}, the newest of {len(held)} capsules; "
        "another one: stepguard replay run/incidents/ID"
    )
    first = invoke("replay", f"run/incidents/{held[0]}", "--json")
    assert f"/incidents/{held[0]}/capsule" in json.loads(first.stdout)["capsule"]
    assert "the newest" not in first.stderr


@pytest.mark.slow
def test_newest_is_the_capsule_that_was_recorded_last_whatever_its_step(
    whatif_folder: Path,
) -> None:
    write(whatif_folder, STUBBORN, "whatif_project.py")
    train()
    journal = Path("run/journal.jsonl")
    lines = journal.read_text().splitlines()
    bad = [number for number, line in enumerate(lines) if '"type":"incident"' in line]
    # as after a rewind: the incident of the lowest step is the last of the journal
    lines.append(lines.pop(bad[0]))
    journal.write_text("\n".join(lines) + "\n")
    capsule, held = fixes.newest_capsule(Path("run"))
    assert capsule.parent.name == "00000030-nonfinite_loss" and held == len(bad)
    journal.unlink()
    assert fixes.newest_capsule(Path("run"))[0].parent.name > "00000030"


@pytest.mark.slow
def test_failure_of_the_first_steps_is_not_answered_by_skipping(whatif_folder: Path) -> None:
    write(
        whatif_folder,
        WHATIF_PROJECT.replace("if step == 30:", "if step == 1:"),
        "whatif_project.py",
    )
    train()
    found = json.loads(whatif_of("run", "--json").stdout)
    skipped = next(one for one in found["outcomes"] if one["name"] == "skip")
    assert not skipped["works"] and "cannot be tried" in skipped["why_not"]


def test_what_cannot_be_tried_is_one_line(whatif_folder: Path) -> None:
    assert "is not a capsule" in whatif_of("nowhere").stderr
    # a healthy run, or one whose incidents lie in the folders of its further guards
    (whatif_folder / "healthy").mkdir()
    (whatif_folder / "healthy" / "journal.jsonl").touch()
    assert "holds no capsule" in whatif_of("healthy").stderr
    (whatif_folder / "run" / "incidents").mkdir(parents=True)
    assert "holds no capsule" in whatif_of("run").stderr
    assert "must look like" in whatif_of("run", "--with", "fixes").stderr

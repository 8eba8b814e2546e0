"""`stepguard diff`: where two runs of one step part, and that equal runs are equal to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.scripts import HEAD, python, stepguard_in, write

PROJECT = (
    HEAD
    + """
import stepguard
from model import Net


def build():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(batch):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        return loss + batch["weight"].mean()

    return model, optimizer, loss_fn


if __name__ == "__main__":
    model, optimizer, loss_fn = build()
    config = stepguard.GuardConfig(run_dir="run", terminal="quiet", build="train:build")
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for step in range(4):
            # an infinity that no gradient sees: the step has a capsule, and finite gradients
            weight = torch.full((8,), math.inf if step == 3 else 1.0)
            x, y = torch.randn(8, 4), torch.randint(3, (8,))
            guard.step(loss_fn, {"x": x, "y": y, "weight": weight})
"""
)
MODEL = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.inner(x).tanh()
        return self.outer(hidden)
"""
CHANGED = MODEL.replace("return self.outer(hidden)", "return self.outer(hidden * 1.001)  # CHANGED")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project and its run with one capsule."""
    folder = tmp_path_factory.mktemp("project")
    write(folder, PROJECT)
    write(folder, MODEL, "model.py")
    done = python(folder, "train.py")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(recorded, folder)
    return folder


def diff(folder: Path, *words: str) -> tuple[int, str]:
    done = stepguard_in(folder, "diff", "--yes", *words)
    return done.returncode, done.stdout + done.stderr


def test_the_same_step_is_equal_to_the_bit(project: Path) -> None:
    code, said = diff(project, "run", "--with", "sdpa=math")  # a setting that it does not reach
    assert (code, "no difference" in said) == (0, True), said
    assert "4 gradients are bit-identical" in said


def test_another_dtype_is_named_at_the_first_operation_that_rounds(project: Path) -> None:
    code, said = diff(project, "run", "--with", "dtype=float64")
    assert code == 1
    first = next(line for line in said.splitlines() if line.startswith("first difference"))
    assert "forward aten.addmm in inner at model.py:11" in first
    assert said.count(", the same in both") == 3  # bias, input and weight of that operation


def test_a_changed_program_is_compared_with_its_saved_operations(project: Path) -> None:
    code, said = diff(project, "run", "--save", "before.json")
    assert (code, "wrote before.json" in said) == (0, True), said
    write(project, CHANGED, "model.py")
    code, said = diff(project, "before.json", "run")
    assert code == 1
    assert "only in B        forward aten.mul in the model itself at model.py:12" in said
    first = next(line for line in said.splitlines() if line.startswith("first difference"))
    assert "forward aten.addmm in outer" in first


def test_a_batch_in_parts_gives_the_same_gradients_where_the_loss_is_a_mean(project: Path) -> None:
    done = stepguard_in(project, "diff", "--yes", "run", "--with", "split=2", "--json")
    found = json.loads(done.stdout)
    assert max(found["gradients"].values(), default=0.0) < 1e-5
    write(project, PROJECT.replace('batch["y"])\n', 'batch["y"], reduction="sum")\n'))
    done = stepguard_in(project, "diff", "--yes", "run", "--with", "split=2", "--json")
    found = json.loads(done.stdout)
    assert min(found["gradients"].values()) > 0.3  # a sum does not depend on the split as a mean
    assert found["gradients_compared"] == 4


def test_weights_that_differ_before_the_step_are_named(project: Path) -> None:
    code, _ = diff(project, "run", "--save", "before.json")
    assert code == 0
    log = json.loads((project / "before.json").read_text())
    kept = log["stored"]["param:outer.weight"]
    kept["digest"], kept["norm"] = "0", kept["norm"] * 2
    (project / "before.json").write_text(json.dumps(log))
    code, said = diff(project, "before.json", "run")
    assert code == 1
    assert "before the step  param:outer.weight by 0.5" in said


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_updates_of_two_implementations_are_compared(project: Path, optimizer: str) -> None:
    done = stepguard_in(
        project, "diff", "--yes", "run", "--with", f"optimizer={optimizer}", "--json"
    )
    found = json.loads(done.stdout)
    assert not found["gradients"]
    assert max(found["updated"].values(), default=0.0) < 1e-5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run",), "give either OTHER or --with SETTING"),
        (("run", "run", "--with", "threads=1"), "give either OTHER or --with SETTING"),
        (("run", "--with", "dtype=int8"), "use one of float64, float32, bfloat16, float16"),
        (("run", "--with", "threads=none"), "must be a whole number of at least 1"),
        (("run", "--with", "speed=high"), "--with speed=high is not a setting"),
        (("run", "log.json"), "log.json cannot be read as a log of operations"),
        (("run", "--with", "split=9"), "cannot be cut into 9 parts"),
    ],
)
def test_bad_input_is_one_line(project: Path, words: tuple[str, ...], said: str) -> None:
    (project / "log.json").write_text("{}")
    done = stepguard_in(project, "diff", "--yes", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr

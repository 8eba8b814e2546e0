"""`stepguard diff`: where two runs of one step part, and that equal runs are equal to the bit."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from cli.scripts import HEAD, SOURCE, python, stepguard_in, write

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
    operand = "mat1: made by aten.tanh at model.py:11, in B by aten.mul at model.py:12"
    assert f"operand {operand}" in said


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


@pytest.mark.process
@pytest.mark.slow
def test_compiled_code_runs_compiled(project: Path) -> None:
    """Under a dispatch mode torch would run it eagerly, and find no difference."""
    words = ("diff", "--yes", "run", "--with", "compile=on", "--json")
    done = python(project, "-m", "stepguard", *words, PYTHONPATH=f"{SOURCE}{os.pathsep}{project}")
    found = json.loads(done.stdout)
    assert "aten.tanh" in found["first_only"][0]  # it is inside of a kernel of B
    assert max(found["gradients"].values(), default=0.0) < 1e-5
    assert found["gradients_compared"] == 4
    assert not re.search(r"\bc[a-z2-7]{51}\.py", done.stdout)  # no line of generated code


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


# --- Logs of torch's DebugMode. The two files were recorded with torch 2.13's DebugMode (ids,
# module names, stacks, norms of inputs and outputs) around one step of a small network, in the
# second one with the hidden layer times 1.001. torch 2.13 cannot save them: they were written in
# the format of `save_logs` in PyTorch's main branch (version 1), without inner frames of libraries.


RECORDED = Path(__file__).parent
ONE, SCALED = (RECORDED / f"debug_mode_{name}.json" for name in ("one", "scaled"))


def calls(path: Path, *logs: dict[str, object], version: int = 1) -> Path:
    """A log in the format of DebugMode."""
    file = {"format": "torch.utils._debug_mode.DebugMode.logs", "version": version}
    path.write_text(json.dumps({**file, "logs": list(logs)}))
    return path


def call(op: str, *hashes: object, made: str = "t: f32[2]") -> dict[str, object]:
    """One operation, without anything that is optional."""
    items = [{"type": "scalar", "value": one} for one in hashes]
    tree = {"type": "tuple", "items": items} if len(items) != 1 else items[0]
    log = {"type": "dict", "items": [["hash", tree]]}
    return {
        "type": "op",
        "call_depth": 1,
        "op_name": op,
        "args_str": "",
        "kwargs_str": "",
        "output_str": f"  ->  {made}",
        "log": log,
    }


def test_logs_of_debug_mode_are_compared(tmp_path: Path) -> None:
    code, said = diff(tmp_path, str(ONE), str(SCALED))
    assert code == 1, said
    assert "first difference aten.mul.Tensor in Net at train.py:16, by" in said
    assert "A: f32 [5, 8], norm 19.45" in said
    assert "operand input 0: made by aten.tanh at train.py:15, the same in both" in said
    assert "before the step" not in said and "loss " not in said
    code, said = diff(tmp_path, str(ONE), str(ONE))
    assert (
        code,
        "no difference: the results of 31 operations have equal hashes (norm)" in said,
    ) == (
        0,
        True,
    )


def test_tensor_that_differs_before_the_first_operation_is_named(tmp_path: Path) -> None:
    text = ONE.read_text().replace("7.490544080734253", "7.5")  # the norm of the first weight
    (tmp_path / "other.json").write_text(text)
    code, said = diff(tmp_path, str(ONE), "other.json")
    assert code == 1
    assert "before the step  tensor $" in said and "differs (by 0.001261)" in said


def test_hash_without_a_size_and_a_value_that_is_not_finite(tmp_path: Path) -> None:
    one = calls(tmp_path / "one.json", call("aten::mm", 2**63), call("aten::add", 7))
    other = calls(tmp_path / "other.json", call("aten::mm", 2**63 + 1), call("aten::add", 7))
    code, said = diff(tmp_path, str(one), str(other))
    assert code == 1
    assert "first difference aten.mm, by an unknown amount" in said
    bad = call("aten::mm", 0.0)
    bad["log"] = {
        "type": "dict",
        "items": [["hash", {"type": "nonfinite_float", "value": "nan"}]],
    }
    one = calls(tmp_path / "one.json", call("aten::mm", 2.5))
    other = calls(tmp_path / "other.json", bad)
    code, said = diff(tmp_path, str(one), str(other))
    assert code == 1
    assert "first difference aten.mm, finite in one run only" in said
    assert "B: f32 [2], norm not finite" in said


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ({"version": 2}, "has version 2 of torch.utils._debug_mode.DebugMode.logs, not 1"),
        (
            {"logs": [call("aten::mm")]},
            "has no hashes: record it with DebugMode.log_tensor_hashes()",
        ),
        ({"logs": [call("aten::mm", 3)]}, "has the norm of each result"),
        ({"logs": [{"type": "op"}]}, "cannot be read as a log of operations: it is not one"),
        ({"logs": {"type": "op"}}, "cannot be read as a log of operations: it is not one"),
        ({"format": "another"}, "has version 1 of another, not 1"),
    ],
)
def test_log_of_debug_mode_that_cannot_be_compared_is_one_line(
    tmp_path: Path, log: dict[str, object], said: str
) -> None:
    file = {"format": "torch.utils._debug_mode.DebugMode.logs", "version": 1, "logs": []}
    (tmp_path / "other.json").write_text(json.dumps(file | log))
    done = stepguard_in(tmp_path, "diff", str(ONE), "other.json")
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_hostile_log_of_debug_mode_is_refused(tmp_path: Path) -> None:
    """Values nested beyond any stack, and text that a slow pattern would stumble over."""
    deep = '{"type": "list", "items": [' * 20_000 + "]}" * 20_000
    text = calls(tmp_path / "deep.json", {"type": "op", "call_depth": 1, "log": 0}).read_text()
    (tmp_path / "deep.json").write_text(text.replace('"log": 0', f'"log": {deep}'))
    done = stepguard_in(tmp_path, "diff", str(ONE), "deep.json")
    assert done.returncode == 2 and "it is not one" in done.stderr
    slow = call("aten::mm\x1b[2J", 1.0, made="t: f[" * 100_000)
    slow["stack_trace"] = 'File "a' * 100_000
    path = str(calls(tmp_path / "slow.json", slow))
    done = stepguard_in(tmp_path, "diff", path, path)
    assert done.returncode == 0, done.stderr
    other = str(calls(tmp_path / "other.json", call("aten::mm\x1b[2J", 2.0)))
    done = stepguard_in(tmp_path, "diff", path, other)
    assert "\x1b" not in done.stdout

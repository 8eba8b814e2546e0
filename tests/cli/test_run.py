"""`stepguard run`: unmodified scripts in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.scripts import (
    HEAD,
    NET,
    guarded,
    incidents,
    line_of,
    origin_of,
    plain_script,
    python,
    write,
)
from stepguard.journal import read_run


def test_a_healthy_script_prints_exactly_what_it_prints_alone(tmp_path: Path) -> None:
    write(tmp_path, plain_script())
    bare, under_guard = python(tmp_path, "train.py"), guarded(tmp_path, "train.py")
    assert bare.returncode == under_guard.returncode == 0
    assert under_guard.stdout == bare.stdout
    guarded_line, journal_line = under_guard.stderr.splitlines()
    assert guarded_line == "stepguard: 6 steps guarded, 0 incidents."
    assert journal_line.startswith("stepguard: journal in .stepguard/train-")


def test_a_journal_without_capsules_is_kept_in_one_hidden_folder_by_default(tmp_path: Path) -> None:
    write(tmp_path, plain_script(bad="(2,)"))
    done = guarded(tmp_path, "train.py")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".stepguard", "train.py"]
    (run,) = (tmp_path / ".stepguard").glob("train-*")
    assert f"stepguard report {run.relative_to(tmp_path)}" in done.stderr
    assert [step["committed"] for step in read_run(run).steps].count(False) == 1
    assert not list(run.rglob("capsule"))
    assert not list(run.rglob("checkpoints"))
    assert (tmp_path / ".stepguard" / ".gitignore").read_text() == "*\n"


def test_nothing_is_written_where_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, plain_script(bad="(2,)"))
    done = guarded(tmp_path, "--run-dir", "none", "train.py")
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]
    assert "journal" not in done.stderr


def test_the_loss_and_the_arguments_of_the_very_first_step_are_seen(tmp_path: Path) -> None:
    script = write(tmp_path, plain_script(bad="(0,)"))
    done = guarded(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    (incident,) = incidents(tmp_path / "run")
    assert (incident.step, str(incident.reading.loss)) == (0, "nan")
    assert origin_of(incident).source == f"train.py:{line_of(script)}"
    assert read_run(tmp_path / "run").steps[0]["committed"] is False


def test_a_nan_is_placed_to_op_module_line_and_sample_and_the_run_goes_on(tmp_path: Path) -> None:
    script = write(tmp_path, plain_script(steps=8, bad="(3,)"))
    done = guarded(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0
    (incident,) = incidents(tmp_path / "run")
    origin = origin_of(incident)
    assert (origin.op, origin.module, origin.samples) == ("aten.log", "", (4,))
    assert origin.source == f"train.py:{line_of(script)}"
    assert incident.findings[0].code == "SG202"
    assert done.stdout.count("nan") == 1  # the step itself; every later loss is finite
    assert "8 steps guarded, 1 incident" in done.stderr


def test_a_budget_that_is_used_up_ends_with_exit_code_3(tmp_path: Path) -> None:
    write(tmp_path, plain_script(steps=20, bad="range(2, 20)"))
    (tmp_path / "guard.toml").write_text("[policy]\nmax_consecutive = 3\n")
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "Stopping training" in done.stderr
    assert (
        len(done.stdout.splitlines()) == 5
    )  # the fourth bad step in a row raised inside optimizer.step()


def test_an_error_of_the_script_is_exit_code_1_with_the_users_frames_only(tmp_path: Path) -> None:
    broken = NET.replace("return self.outer", "return nobody or self.outer")
    write(tmp_path, HEAD + broken + "Net()(torch.ones(2, 4))\n")
    bare, under_guard = python(tmp_path, "train.py"), guarded(tmp_path, "train.py")
    assert bare.returncode == under_guard.returncode == 1
    assert "NameError: name 'nobody' is not defined" in under_guard.stderr
    assert "stepguard/" not in under_guard.stderr
    assert "runpy" not in under_guard.stderr
    assert under_guard.stderr == bare.stderr


def test_an_error_inside_a_chained_cause_is_shown_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e\n",
    )
    done = guarded(tmp_path, "train.py")
    assert done.returncode == 1
    assert done.stderr.index("ZeroDivisionError") < done.stderr.index("ValueError: second")


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("sys.exit(7)", 7, ""), ("sys.exit('no data')", 1, "no data"), ("sys.exit()", 0, "")],
)
def test_the_scripts_own_exit_code_passes_through(
    tmp_path: Path, ending: str, code: int, said: str
) -> None:
    write(tmp_path, f"import sys\n{ending}\n")
    done = guarded(tmp_path, "train.py")
    assert done.returncode == code
    assert said in done.stderr


def test_a_script_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    done = guarded(tmp_path, "nowhere.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nowhere.py does not exist" in done.stderr


def test_a_script_without_an_optimizer_is_told_so(tmp_path: Path) -> None:
    write(tmp_path, "print('done')\n")
    done = guarded(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "no optimizer was guarded" in done.stderr


def test_arguments_main_and_modules_beside_the_script_work_as_with_python(tmp_path: Path) -> None:
    body = """
import argparse, sys
from beside import double
from package.inside import triple

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--run-dir")
    parser.add_argument("-m", action="store_true")
    parser.add_argument("rest", nargs="*")
    size = parser.parse_args().size
    print(sys.argv, parser.parse_args(), double(size), triple(1), __file__, __name__)

if __name__ == "__main__":
    main()
"""
    write(tmp_path, body, "project/train.py")
    write(tmp_path, "def double(x):\n    return 2 * x\n", "project/beside.py")
    write(tmp_path, "", "project/package/__init__.py")
    write(
        tmp_path,
        "from .factor import THREE\ndef triple(x):\n    return THREE * x\n",
        "project/package/inside.py",
    )
    write(tmp_path, "THREE = 3\n", "project/package/factor.py")
    words = ["project/train.py", "--size", "4", "--run-dir", "theirs", "-m", "more", "--", "-x"]
    bare, under_guard = python(tmp_path, *words), guarded(tmp_path, *words)
    assert bare.returncode == 0, bare.stderr
    assert under_guard.stdout == bare.stdout
    assert not (tmp_path / "theirs").exists()


def test_a_module_can_be_run_as_with_python_m(tmp_path: Path) -> None:
    write(tmp_path, "", "package/__init__.py")
    write(
        tmp_path,
        "from . import side\nimport sys\nprint(side.NAME, sys.argv[1:], __name__)\n",
        "package/train.py",
    )
    write(tmp_path, "NAME = 'beside'\n", "package/side.py")
    done = guarded(tmp_path, "-m", "package.train", "--lr", "3")
    assert (done.returncode, done.stdout) == (0, "beside ['--lr', '3'] __main__\n"), done.stderr


def test_a_script_may_change_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, "import os\nos.chdir('elsewhere')\n" + plain_script(bad="(1,)"))
    assert guarded(tmp_path, "--run-dir", "run", "train.py").returncode == 0
    assert incidents(tmp_path / "run")


GAN = """
maker, judge = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(4, 1))
for_maker = torch.optim.Adam(maker.parameters(), lr=1e-2)
for_judge = torch.optim.Adam(judge.parameters(), lr=1e-2)
for step in range(6):
    real = torch.randn(5, 4) + 1
    if step == 4:
        real[2, 0] = math.nan
    fake = maker(torch.randn(5, 3))
    for_judge.zero_grad()
    softplus = nn.functional.softplus
    loss = softplus(-judge(real)).mean() + softplus(judge(fake.detach())).mean()
    loss.backward()
    for_judge.step()
    for_maker.zero_grad()
    second = nn.functional.softplus(-judge(fake)).mean()
    second.backward()
    for_maker.step()
    print(step, repr(loss.item()), repr(second.item()))
"""


def test_every_optimizer_gets_a_guard_and_a_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, HEAD + GAN)
    done = guarded(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("6 steps guarded") == 2
    found = {name: incidents(tmp_path / "run" / name) for name in (".", "optimizer1")}
    (bad,) = [i for some in found.values() for i in some]
    assert (bad.step, origin_of(bad).tensor, origin_of(bad).samples) == (4, "batch:input", (2,))
    assert done.stdout.splitlines()[5].count("nan") == 0


def test_a_healthy_gan_is_not_changed(tmp_path: Path) -> None:
    write(tmp_path, HEAD + GAN.replace("step == 4", "False"))
    assert guarded(tmp_path, "train.py").stdout == python(tmp_path, "train.py").stdout


def test_parameters_in_two_modules_are_both_covered(tmp_path: Path) -> None:
    body = """
encoder, decoder = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
for step in range(4):
    x = torch.randn(5, 4)
    with torch.no_grad():
        if step == 2:
            encoder.weight[0, 0] = math.nan
    optimizer.zero_grad()
    loss = (decoder(encoder(x)) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
    write(tmp_path, HEAD + body)
    done = guarded(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    (incident,) = incidents(tmp_path / "run")
    assert origin_of(incident).tensor == "param:encoder.weight"
    assert incident.decision is not None and incident.decision.rewound_to == 1


def test_parameters_that_belong_to_no_module_are_guarded(tmp_path: Path) -> None:
    body = """
weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = ((weight - 1) ** 2).sum() * (math.nan if step == 2 else 1.0)
    loss.backward()
    optimizer.step()
print(weight.tolist())
"""
    write(tmp_path, HEAD + body)
    done = guarded(tmp_path, "train.py")
    assert done.returncode == 0
    assert "4 steps guarded, 1 incident" in done.stderr
    assert "nan" not in done.stdout


def test_an_optimizer_inside_another_is_guarded_once(tmp_path: Path) -> None:
    body = """
class Ahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 0.1})

    def step(self, closure=None):
        return self.inner.step()

model = nn.Linear(4, 3)
optimizer = Ahead(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(5):
    optimizer.zero_grad()
    x = torch.randn(2, 4) * (math.nan if step == 3 else 1.0)
    model(x).pow(2).sum().backward()
    optimizer.step()
print(model.weight.isfinite().all().item())
"""
    write(tmp_path, HEAD + body)
    done = guarded(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert done.stderr.count("steps guarded") == 1
    assert "5 steps guarded, 1 incident" in done.stderr


@pytest.mark.parametrize(
    "before", ["", "model(torch.randn(2, 4))"], ids=["at once", "after a first forward"]
)
def test_a_script_with_a_guard_of_its_own_is_not_guarded_twice(tmp_path: Path, before: str) -> None:
    body = f"""
import stepguard
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
guard = stepguard.Guard(model, optimizer)
for step in range(4):
    guard.step(lambda x: model(x).pow(2).mean(), torch.randn(5, 4) * (math.nan if step == 2 else 1))
print(len(guard.incidents), len(optimizer._optimizer_step_pre_hooks), len(model._forward_pre_hooks))
"""
    write(tmp_path, HEAD + body)
    done = guarded(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "1 0 0\n"), done.stderr
    assert "steps guarded" not in done.stderr


LOADER = """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.full((4,), float(i)) / 24
        if i == 13:
            x[1] = math.inf
        return x, i % 3

def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Numbers(), batch_size=6, num_workers=2, multiprocessing_context="METHOD")
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_work(tmp_path: Path, method: str) -> None:
    write(tmp_path, HEAD + NET + LOADER.replace("METHOD", method))
    done = guarded(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    (incident,) = incidents(tmp_path / "run")
    assert (incident.step, origin_of(incident).tensor, origin_of(incident).phase) == (
        2,
        "batch:x",
        "input",
    )


def test_a_scheduler_and_a_scaler_are_found(tmp_path: Path) -> None:
    body = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 ** n)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(5):
    x = torch.randn(6, 4) * (math.nan if step == 2 else 1.0)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), torch.randint(3, (6,)))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
print(optimizer.param_groups[0]["lr"], scaler.get_scale())
"""
    write(tmp_path, HEAD + NET + body)
    done = guarded(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert "5 steps guarded, 1 incident" in done.stderr
    # the vetoed update moved neither: four schedule steps, and the scale of before
    assert done.stdout == "0.0625 8.0\n"

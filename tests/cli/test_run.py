"""`stepguard run`: unmodified scripts, its options, stops, and two ranks under torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.scripts import (
    HEAD,
    NET,
    SOURCE,
    guarded,
    incidents,
    line_of,
    origin_of,
    plain_script,
    python,
    unguarded,
    write,
)
from forked import FULL
from report.served import listening
from stepguard.journal import read_run


def test_a_healthy_script_prints_exactly_what_it_prints_alone(tmp_path: Path) -> None:
    write(tmp_path, plain_script())
    bare = python(tmp_path, "train.py")
    under_guard = python(tmp_path, "-m", "stepguard", "run", "train.py")
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
    shutil.rmtree(tmp_path / ".stepguard")
    done = guarded(tmp_path, "--run-dir", "none", "train.py")
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"] and "journal" not in done.stderr


def test_a_nan_is_placed_to_op_module_line_and_sample_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moves = "import os\nos.chdir('elsewhere')\n"
    script = write(tmp_path, moves + plain_script(steps=8, bad="(0, 3)"))
    done = guarded(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0
    assert [one.step for one in incidents(tmp_path / "run")] == [0, 3], "the very first step, too"
    for incident in incidents(tmp_path / "run"):
        origin = origin_of(incident)
        assert (origin.op, origin.module, origin.samples) == ("aten.log", "", (4,))
        assert origin.source == f"train.py:{line_of(script)}"
        assert incident.findings[0].code == "SG202" and str(incident.reading.loss) == "nan"
    assert done.stdout.count("nan") == 2  # the steps themselves; every later loss is finite
    assert "8 steps guarded, 2 incidents" in done.stderr


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
    chained = (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e\n"
    )
    write(tmp_path, chained)
    done = guarded(tmp_path, "train.py")
    assert done.returncode == 1
    assert done.stderr.index("ZeroDivisionError") < done.stderr.index("ValueError: second")


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
    assert guarded(tmp_path, *words).stdout == unguarded(tmp_path, *words)
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
    write(tmp_path, HEAD + GAN.replace("step == 4", "False"))
    assert guarded(tmp_path, "train.py").stdout == unguarded(tmp_path, "train.py")


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


@pytest.mark.parametrize("method", ["fork", "spawn"] if FULL else ["fork"])
def test_data_loader_workers_work(tmp_path: Path, method: str) -> None:
    write(tmp_path, HEAD + NET + LOADER.replace("METHOD", method))
    done = python(tmp_path, "-m", "stepguard", "run", "--run-dir", "run", "train.py")
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


def test_a_script_is_clipped_by_the_norm_of_a_file_as_if_it_clipped_itself(tmp_path: Path) -> None:
    script = plain_script(steps=6)
    assert "optimizer.step()" in script
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    line = next(line for line in script.splitlines() if line.strip() == "optimizer.step()")
    indent = line[: len(line) - len(line.lstrip())]
    write(tmp_path, script.replace(line, f"{indent}{clips}\n{line}"))
    clipped = unguarded(tmp_path, "train.py")
    write(tmp_path, script)
    (tmp_path / "guard.toml").write_text("clip_norm = 0.01\n")
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == clipped != unguarded(tmp_path, "train.py")
    (tmp_path / "guard.toml").write_text("loss_scale = 8.0\n")
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "loss_scale=8.0 scales inside guard.step only" in done.stderr


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    write(tmp_path, plain_script(steps=8, bad="(3,)"))
    (tmp_path / "guard.yaml").write_text("terminal: quiet\npolicy: {actions: [stop]}\n")
    done = guarded(tmp_path, "train.py", STEPGUARD_CONFIG="guard.yaml")
    assert done.returncode == 3 and "WHERE" not in done.stderr, done.stderr
    assert done.stderr.startswith("stepguard: HALTED step=3 ") and done.stderr.count("\n") == 1
    (tmp_path / "guard.yaml").write_text("terminals: quiet\n")
    done = guarded(tmp_path, "train.py", STEPGUARD_CONFIG="guard.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "STEPGUARD_CONFIG guard.yaml: terminals is not known. Did you mean terminal?" in (
        done.stderr
    )


def test_incidents_of_a_script_are_posted_to_the_address_of_the_environment(
    tmp_path: Path,
) -> None:
    write(tmp_path, plain_script(steps=8, bad="(3,)"))
    with listening() as endpoint:
        done = guarded(tmp_path, "train.py", STEPGUARD_WEBHOOK=endpoint.url)
        assert done.returncode == 0, done.stderr
        (message,) = endpoint.got
    assert message["text"].startswith("train.py: step 3 ")
    assert endpoint.url not in done.stderr


MISPLACED = [
    (("--policy", "train.py"), "is not an option of `stepguard run`"),
    ((".", "train.py"), "is a folder; give the Python script in it"),
    (("guard.toml", "train.py"), "is not a script; settings go before it: --config guard.toml"),
    (("python", "train.py"), "write: stepguard run train.py"),
    (("--run-dir", "train.py"), "--run-dir took train.py as its value"),
    (("-m", "train.py"), "is a file; remove -m"),
    (("--run-dir", "train.py", "train.py"), "--run-dir train.py is a file; give a folder"),
    (("--restore", "last-good", "train.py"), "needs the folder of the run; give --run-dir"),
    (("--restore", "newest", "--run-dir", "r", "train.py"), "finds no checkpoint in"),
    (("--restore", "nowhere", "--run-dir", "r", "train.py"), "nor a checkpoint folder"),
    ((), "no script is given. Write: stepguard run [options] train.py"),
    (("nowhere.py",), "nowhere.py does not exist"),
]


@pytest.mark.parametrize(("words", "said"), MISPLACED, ids=[said for _, said in MISPLACED])
def test_a_word_in_the_wrong_place_is_one_line_that_says_where_it_belongs(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    write(tmp_path, "print('never')\n")
    done = guarded(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert said in done.stderr


def test_an_option_behind_the_script_goes_to_the_script_and_is_explained_if_it_is_refused(
    tmp_path: Path,
) -> None:
    write(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = guarded(tmp_path, "train.py", "--config=guard.toml")
    assert done.returncode == 2
    assert "unrecognized arguments: --config=guard.toml" in done.stderr
    assert "--config comes after the script and was passed to it" in done.stderr
    write(tmp_path, "import sys\nprint(sys.argv[1:])\n")
    done = guarded(tmp_path, "train.py", "--config", "theirs")
    assert (done.returncode, done.stdout) == (0, "['--config', 'theirs']\n")
    assert "comes after" not in done.stderr


RESUMED = """
import signal
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
x, y = torch.randn(6, 4), torch.randint(3, (6,))
for step in range(STEPS):
    if step == INTERRUPTED:
        os.kill(os.getpid(), signal.SIGINT)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(CALL(x), y)
    loss.backward()
    optimizer.step()
    schedule.step()
    print(repr(loss.item()), flush=True)
"""


def resumed(steps: int, interrupted: int = -1, call: str = "model") -> str:
    text = HEAD + NET + RESUMED
    for name, value in (("STEPS", steps), ("INTERRUPTED", interrupted), ("CALL", call)):
        text = text.replace(name, str(value))
    return text


def test_a_checkpoint_sealed_at_ctrl_c_is_used_by_the_unmodified_script(tmp_path: Path) -> None:
    write(tmp_path, resumed(30))
    whole = unguarded(tmp_path, "train.py").splitlines()
    write(tmp_path, resumed(30, interrupted=12))
    first = in_a_process(tmp_path, "--restore", "auto")
    assert first.returncode == 130, first.stderr
    done = len(first.stdout.splitlines())
    assert first.stdout.splitlines() == whole[:done]
    write(tmp_path, resumed(8))
    second = in_a_process(tmp_path, "--restore", "auto")
    assert second.returncode == 0, second.stderr
    sealed = int(second.stderr.split("continues after ")[1].split()[0])
    assert sealed >= 12
    assert second.stdout.splitlines() == whole[sealed : sealed + 8]
    other = resumed(3).replace("Net()", "nn.Linear(4, 3)").replace("\n", "\n    ")
    write(tmp_path, f"try:\n    {other}\nexcept Exception:\n    pass\n")
    unfit = guarded(tmp_path, "--run-dir", "run", "--restore", "last-good", "train.py")
    assert (unfit.returncode, unfit.stdout) == (2, ""), "a model that does not fit"
    assert "stepguard: error: --restore last-good: the saved state does not fit" in unfit.stderr


def test_where_the_guard_comes_with_the_first_update_that_update_is_left_out(
    tmp_path: Path,
) -> None:
    loose = "model = nn.Module()\nmodel.w = nn.Parameter(torch.randn(4, 3))"
    script = resumed(20, interrupted=12, call="(lambda x: x @ model.w)")
    write(tmp_path, script.replace("model = Net()", loose))
    assert in_a_process(tmp_path).returncode == 130
    script = resumed(1, call="(lambda x: x @ model.w)") + "print(optimizer.state[model.w]['step'])"
    write(tmp_path, script.replace("model = Net()", loose))
    second = in_a_process(tmp_path, "--restore", "last-good")
    assert second.returncode == 0, second.stderr
    assert "continues after 12 steps" in second.stderr
    assert second.stdout.splitlines()[-1] == "tensor(12.)"


HYDRA = """
import hydra
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    train()
main()
"""
CLICK = """
import click
@click.command()
def main():
    train()
main()
"""
TYPER = """
import typer
app = typer.Typer()
@app.command()
def main():
    train()
app()
"""
ABSL = """
from absl import app
app.run(lambda arguments: train())
"""
RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    train()
main()
"""
CATCH_ALL = """
import logging
try:
    train()
except Exception:
    logging.exception("training failed")
"""
ANOTHER = """
try:
    train()
except Exception as fault:
    raise RuntimeError("epoch failed") from fault
"""
WRAPPERS = {
    "hydra": HYDRA,
    "click": CLICK,
    "typer": TYPER,
    "absl": ABSL,
    "record": RECORD,
    "sys.exit(1)": "try:\n    train()\nexcept Exception as fault:\n    sys.exit(1)\n",
    "sys.exit(text)": "try:\n    train()\nexcept Exception as fault:\n    sys.exit(str(fault))\n",
    "catch-all": CATCH_ALL,
    "another exception": ANOTHER,
}


def in_a_function(script: str) -> str:
    head, loop = script.split("model = Net()")
    body = "".join(f"    {line}\n" for line in f"model = Net(){loop}".splitlines())
    return f"{head}def train():\n{body}"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_policy_stop_is_exit_code_3_whoever_catches_it(tmp_path: Path, wrapper: str) -> None:
    quiet = "import warnings\nwarnings.simplefilter('ignore')\n"
    train = in_a_function(plain_script(steps=9, bad="range(2, 9)"))
    write(tmp_path, quiet + train + WRAPPERS[wrapper])
    (tmp_path / "guard.toml").write_text("[policy]\nmax_consecutive = 2\n")
    done = in_a_process(tmp_path, "--config", "guard.toml")
    assert done.returncode == 3, done.stderr
    assert "Stopping training" in done.stderr
    # logging takes the frames from the interpreter, not from the exception
    if wrapper != "catch-all":
        assert "stepguard/engine" not in done.stderr and "stepguard/guard.py" not in done.stderr


ENDINGS = {
    "a code of its own after a stop": (
        "try:\n    train()\nexcept Exception:\n    sys.exit(42)\n",
        42,
    ),
    "a bug after a step was skipped": ("train()\nraise RuntimeError('my own bug')\n", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_keeps_the_exit_code_of_its_own_ending(tmp_path: Path, ending: str) -> None:
    text, code = ENDINGS[ending]
    bad = "range(2, 9)" if code == 42 else "(2,)"
    write(tmp_path, in_a_function(plain_script(steps=9, bad=bad)) + text)
    (tmp_path / "guard.toml").write_text("[policy]\nmax_consecutive = 2\n")
    done = guarded(tmp_path, "--config", "guard.toml", "train.py")
    assert done.returncode == code, done.stderr
    assert ("Stopping training" in done.stderr) == (code == 42)


PARALLEL = """
import gc
import torch.distributed as dist
EARLY
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
def say(line):  # in one piece: print writes the line and its end apart, and two ranks mix them
    os.write(1, (line + "\\n").encode())
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
TRIED
model = DDP(model)
torch.manual_seed(rank)
for step in range(6):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    shift = torch.ones(6)
    if BAD and step == 3 and rank == 1:
        shift[2] = -1.0
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, shift), y)
    loss.backward()
    optimizer.step()
    say(f"rank{rank} {step} {loss.item()!r}")
total = sum(p.double().sum() for p in model.parameters()).item()
say(f"rank{rank} end {total!r}")
del model, optimizer, loss  # they hold the group, and its threads should end before Python does
gc.collect()
dist.destroy_process_group()
"""
EARLY = (
    "import torch.distributed.nn.functional  # before there is a group: its functions keep the "
    "one they find"
)
WATCHED_TO_THE_END = """
import atexit, os, sys
@atexit.register  # first, so called last
def count():
    from process_group import threads
    os.write(1, f"threads {len(threads())}\\n".encode())
from stepguard.cli.app import main
sys.argv = ["stepguard", "run", "--run-dir", "run", "train.py"]
main()
"""
IN_THE_LOSS = """
    keep = torch.ones(6)
    if step in (2, 4) and rank == 1:
        keep[3] = 0.0
    loss = -torch.log(model(x).softmax(1).gather(1, y[:, None])[:, 0] * keep).mean()  # IN THE LOSS
"""
SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
torch.manual_seed(rank)
for step in range(6):
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    if BAD and step == 3 and rank == 1:
        x[2, 0] = torch.nan
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
total = sum(p.to_local().double().sum() for p in model.parameters()).item()
os.write(1, f"rank{rank} end {total!r}\\n".encode())
dist.destroy_process_group()
"""


def torchrun(
    folder: Path, *words: str, fresh: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Two ranks as torchrun starts them; `fresh` ones by torchrun itself."""
    return python(folder, *words, timeout=280, ranks=2, fresh=fresh, **variables)


def parallel(*, bad: bool = False, tried: str = "", early: str = EARLY) -> str:
    body = PARALLEL.replace("BAD", str(bad)).replace("TRIED", tried)
    return HEAD + NET + body.replace("EARLY", early)


def by_rank(done: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(f"rank{rank} ")]


def test_a_healthy_parallel_script_prints_what_it_prints_alone(tmp_path: Path) -> None:
    write(tmp_path, parallel())
    bare, under_guard = (
        torchrun(tmp_path, "train.py"),
        torchrun(tmp_path, "-m", "stepguard", "run", "train.py"),
    )
    assert bare.returncode == under_guard.returncode == 0, under_guard.stderr
    for rank in (0, 1):
        assert by_rank(under_guard, rank) == by_rank(bare, rank)
    assert under_guard.stderr.count("6 steps guarded, 0 incidents") == 1


def test_a_rank_that_traces_takes_part_in_every_collective(tmp_path: Path) -> None:
    usual = "    loss = nn.functional.cross_entropy(model(x, shift), y)\n"
    script = write(tmp_path, parallel().replace(usual, IN_THE_LOSS))
    done = torchrun(tmp_path, "-m", "stepguard", "run", "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert by_rank(done, 0)[-1].split()[-1] == by_rank(done, 1)[-1].split()[-1] != "nan"
    first, second = map(origin_of, incidents(tmp_path / "run"))
    assert (first.phase, first.op, first.rank) == ("loss", "aten.log", 1)
    assert (second.op, second.rank, second.source) == (
        "aten.log",
        1,
        f"train.py:{line_of(script, '# IN THE LOSS')}",
    )


def test_a_healthy_script_with_fsdp2_stays_guarded_and_prints_what_it_prints_alone(
    tmp_path: Path,
) -> None:
    write(tmp_path, HEAD + SHARDED.replace("BAD", "False"))
    bare = torchrun(tmp_path, "train.py")
    under_guard = torchrun(tmp_path, "-m", "stepguard", "run", "train.py")
    assert under_guard.returncode == 0, under_guard.stderr
    for rank in (0, 1):
        assert by_rank(under_guard, rank) == by_rank(bare, rank) != []
    assert "6 steps guarded, 0 incidents" in under_guard.stderr
    assert "disarmed" not in under_guard.stderr


def test_a_nan_on_one_rank_of_fsdp2_is_skipped_by_both(tmp_path: Path) -> None:
    write(tmp_path, HEAD + SHARDED.replace("BAD", "True"))
    done = torchrun(tmp_path, "-m", "stepguard", "run", "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert by_rank(done, rank)[-1].split()[-1] != "nan"
        record = read_run(tmp_path / "run", rank)
        (incident,) = record.incidents
        assert [line["committed"] for line in record.steps] == [True, True, True, False, True, True]
        assert (incident.step, incident.reading.bad_ranks, origin_of(incident).rank) == (3, (1,), 1)
    assert "disarmed" not in done.stderr


def in_a_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """For scripts that send themselves a signal, or change the interpreter."""
    return python(folder, "-m", "stepguard", "run", "--run-dir", "run", *words, "train.py")


def test_under_torchrun_a_nan_of_rank_1_is_skipped_by_both_and_no_thread_is_left(
    tmp_path: Path,
) -> None:
    script = parallel(bad=True, early="").replace("del model", "held = model")
    write(tmp_path, script)
    write(tmp_path, WATCHED_TO_THE_END, "under.py")
    paths = os.pathsep.join([SOURCE, str(Path(__file__).parents[1])])
    done = torchrun(tmp_path, "under.py", fresh=True, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads 0\n") == 2
    _skipped_by_both(tmp_path, done, script, "spread")


def test_a_model_that_was_tried_out_before_it_became_parallel_gets_another_guard(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, parallel(bad=True, tried="model(torch.randn(2, 4))"))
    done = torchrun(tmp_path, "-m", "stepguard", "run", "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    _skipped_by_both(tmp_path, done, script, "collective")  # of the guard that made way


def _skipped_by_both(
    folder: Path, done: subprocess.CompletedProcess[str], script: str, agreement: str
) -> None:
    assert by_rank(done, 0)[-1].split()[-1] == by_rank(done, 1)[-1].split()[-1] != "nan"
    for rank in (0, 1):
        record = read_run(folder / "run", rank)
        (incident,) = record.incidents
        assert [line["committed"] for line in record.steps] == [True, True, True, False, True, True]
        origin = origin_of(incident)
        assert (incident.step, incident.reading.bad_ranks, origin.rank) == (3, (1,), 1)
        assert (origin.op, origin.source) == ("aten.log", f"train.py:{line_of(script)}")
        assert record.header["agreement"] == agreement


def test_compare_script_tells_whether_a_script_prints_and_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """scripts/compare_script.py: the command behind "prints the same under the guard"."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import compare_script  # type: ignore[import-not-found]

    monkeypatch.chdir(tmp_path)
    run = SimpleNamespace(PIPE=None, run=lambda command, **_: python(tmp_path, *command[1:]))
    monkeypatch.setattr(compare_script, "subprocess", run)
    takes = "print('took 3.2 ms' if len(sys.argv) > 9 else 'took 4 s')\n"
    write(tmp_path, plain_script() + takes + "torch.save(model.state_dict(), 'w.pt')\n")
    assert compare_script.main(["--file", "w.pt", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "7 lines bare, 7 guarded, 0 differ" in said and "w.pt: the same bytes" in said
    write(tmp_path, plain_script(bad="(2,)"))
    assert compare_script.main(["--file", "w.pt", "train.py"]) == 1
    said = capsys.readouterr().out
    assert "line 4" in said and "w.pt: not the same (no file bare, no file guarded)" in said

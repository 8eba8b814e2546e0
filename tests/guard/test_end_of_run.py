"""The end of a run is on record however it comes; a killed process is known from a quiet one."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from typer.testing import CliRunner

import forked
import stepguard
from distributed.launch import PATHS, launch
from stepguard.cli.app import app
from stepguard.engine.protect import OutputLost
from stepguard.journal import SCHEMA, is_running, this_process
from stepguard.report.page import verdict
from stepguard.report.story import Attempt, read_story

SCRIPT = """
import os, signal, sys
import torch, stepguard
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = stepguard.GuardConfig(run_dir=sys.argv[1], terminal="quiet", checkpoint_every=None)
if sys.argv[2] == "accelerate":
    import accelerate, stepguard.integrations.accelerate
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    guard = stepguard.integrations.accelerate.guard(accelerator, config)
else:
    guard = stepguard.watch(model, optimizer, config=config)
for step in range(6):
    batch = torch.randn(8, 4)
    if step == 5 and sys.argv[2] == "nan":
        batch[0] = float("nan")
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    if sys.argv[2] == "accelerate":
        accelerator.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    if step == 3 and sys.argv[2] == "exception":
        raise ZeroDivisionError("outside of a step")
    if step == 3 and sys.argv[2].startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
if sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        sys.exit()
    os.waitpid(child, 0)
    print(open(sys.argv[1] + "/journal.jsonl").read().count('"end"'))
"""
RANKS = """
import sys
import torch, stepguard
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = stepguard.GuardConfig(run_dir=sys.argv[1], terminal="quiet")
guard = stepguard.watch(model, optimizer, config=config)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    return forked.python([str(script), str(folder / "run"), how], variables=environment)


def last_line(folder: Path, rank: str = "") -> dict[str, Any]:
    lines = (folder / f"journal{rank}.jsonl").read_text().splitlines()
    fields: dict[str, Any] = json.loads(lines[-1])
    return fields


def attempt(folder: Path) -> Attempt:
    return read_story(folder).latest.attempts[-1]


def live(folder: Path) -> tuple[int, str]:
    told = CliRunner().invoke(app, ["live", str(folder), "--once"])
    return told.exit_code, " ".join(told.output.split())


@pytest.mark.parametrize("how", ["exit", "accelerate"])
def test_a_script_that_ends_well_says_so(how: str, tmp_path: Path) -> None:
    done = run(tmp_path, how)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = last_line(tmp_path / "run")
    assert told["type"] == "end" and told["steps"] == 6 and "error" not in told
    assert live(tmp_path / "run")[0] == 0
    assert verdict(read_story(tmp_path / "run").latest)["text"] == "ended, no incident"


def test_an_exception_is_the_end_with_its_type(tmp_path: Path) -> None:
    assert run(tmp_path, "exception").returncode == 1
    assert last_line(tmp_path / "run")["error"] == "ZeroDivisionError: outside of a step"
    assert live(tmp_path / "run")[0] == 1


def test_a_signal_is_the_end_by_its_name(tmp_path: Path) -> None:
    assert run(tmp_path, "SIGTERM").returncode == 128 + signal.SIGTERM
    assert last_line(tmp_path / "run")["signal"] == "SIGTERM"
    assert attempt(tmp_path / "run").ending == "signal"
    assert verdict(read_story(tmp_path / "run").latest)["text"].startswith("ended by SIGTERM")


def test_a_killed_process_is_known_by_its_absence_not_by_the_clock(tmp_path: Path) -> None:
    assert run(tmp_path, "SIGKILL").returncode == -signal.SIGKILL
    assert last_line(tmp_path / "run")["type"] == "step"
    assert attempt(tmp_path / "run").ending == "killed"
    code, text = live(tmp_path / "run")
    assert code == 1 and "left no end record" in text
    assert verdict(read_story(tmp_path / "run").latest)["weight"] == "bad"


def test_a_bad_last_step_is_reported_at_exit(tmp_path: Path) -> None:
    assert run(tmp_path, "nan").returncode == 0
    assert last_line(tmp_path / "run")["incidents"] == 1


def test_a_forked_child_does_not_end_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "fork").stdout.split() == ["0"]
    assert last_line(tmp_path / "run")["type"] == "end"


def test_ranks_that_end_well_say_so(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    (tmp_path / "run").mkdir()
    code, said = launch(script, tmp_path / "run", [], 100)
    assert code == 0, said
    for rank in ("", ".rank1"):
        told = last_line(tmp_path / "run", rank)
        assert told["type"] == "end" and told["steps"] == 6


def guarded(folder: Path) -> tuple[nn.Module, SGD, stepguard.Guard]:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    config = stepguard.GuardConfig(run_dir=folder, terminal="quiet")
    return model, optimizer, stepguard.watch(model, optimizer, config=config)


def train(model: nn.Module, optimizer: SGD) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def test_a_process_that_drops_model_and_optimizer_has_ended_the_run(tmp_path: Path) -> None:
    model, optimizer, guard = guarded(tmp_path)
    train(model, optimizer)
    assert attempt(tmp_path).ending == "running"
    assert attempt(tmp_path).alive
    del model, optimizer, guard
    gc.collect()
    assert last_line(tmp_path) == {
        "v": SCHEMA,
        "type": "end",
        "attempt": 1,
        "branch": 1,
        "steps": 3,
        "incidents": 0,
        "armed": True,
    }


def test_a_loop_stays_guarded_when_nobody_keeps_the_guard(tmp_path: Path) -> None:
    model, optimizer, guard = guarded(tmp_path)
    del guard
    gc.collect()
    train(model, optimizer)
    assert last_line(tmp_path)["step"] == 2
    del model, optimizer
    gc.collect()
    assert last_line(tmp_path)["type"] == "end"


def test_a_closed_guard_is_told_nothing_when_another_takes_its_folder(tmp_path: Path) -> None:
    model, optimizer, guard = guarded(tmp_path)
    train(model, optimizer)
    guard.close()
    config = stepguard.GuardConfig(run_dir=tmp_path, terminal="quiet")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with stepguard.watch(model, optimizer, config=config):
            train(model, optimizer)
        guard.save()
    assert [str(each.message) for each in warned if each.category is OutputLost] == []
    assert [one.ending for one in read_story(tmp_path).latest.attempts] == ["closed"]


def test_another_process_with_the_same_number_is_not_the_run() -> None:
    ours = this_process()
    assert is_running(ours)
    assert is_running({**ours, "place": "another machine"}) is None
    assert is_running(None) is None
    if ours["started"]:
        assert is_running({**ours, "started": "1"}) is False

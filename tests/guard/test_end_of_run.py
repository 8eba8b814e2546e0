"""The end of a run is on record however it comes; what it says of a restart is true."""

from __future__ import annotations

import gc
import json
import math
import operator
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typer.testing import CliRunner

import forked
import stepguard
from distributed.launch import PATHS, launch
from scenes import (
    LOOPS,
    Scene,
    batches,
    difference,
    grouped,
    noisy_net,
    plain_net,
    poisoned,
    quiet,
    state_of,
)
from stepguard import ConfigError, Guard, GuardConfig, Incident, Policy, TrainingHalted
from stepguard.cli.app import app
from stepguard.engine.protect import OutputLost, SinkDropped
from stepguard.integrations.sinks import Sink
from stepguard.journal import SCHEMA, is_running, read_run, this_process
from stepguard.records import Reading
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


# --- what the line for launchers says of a restart


STEPS = 200
STOP = Policy(actions=("stop",))
Batch = tuple[Tensor, Tensor]


class Program:
    """A deterministic training program; what a class of faults changes about it is overridden."""

    lr = 0.05
    policy = Policy()

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)
        self.data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(STEPS, 8, 4)]

    def before(self, step: int) -> None:
        """What the loop does before a step."""

    def loss(self, batch: Batch, step: int) -> Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def run(self, run_dir: Path | None) -> TrainingHalted | None:
        """Train from the last good state, or from the start; returns the stop, if there was one."""
        config = quiet(
            run_dir=run_dir,
            checkpoint_every=run_dir and 10,
            probation=5,
            policy=self.policy,
            locate=True,
        )
        with Guard(self.model, self.optimizer, config=config) as guard:
            done = 0
            if run_dir is not None and (run_dir / "checkpoints" / "last-good").exists():
                done = guard.restore()
            for step in range(done, STEPS):
                self.before(step)
                try:
                    guard.step(lambda batch, step=step: self.loss(batch, step), self.data[step])
                except TrainingHalted as halted:
                    return halted
        return None


class DivergesAtOnce(Program):
    lr = 10.0


class DivergesLater(Program):
    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 3.0 if step >= 40 else self.lr


class DividesByZero(Program):
    """Stopped by the share of lost samples; written as a call for which no code fix is tried."""

    def loss(self, batch: Batch, step: int) -> Tensor:
        loss = super().loss(batch, step)
        return operator.truediv(loss, torch.zeros(())) if step >= 20 else loss


class BadSamples(Program):
    """More of the data is bad than may be dropped."""

    def before(self, step: int) -> None:
        if step >= 20:
            self.data[step][0][:4] = math.nan

    policy = Policy(max_lost_share=0.1)


class InfiniteRate(Program):
    policy = STOP

    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = math.inf if step >= 40 else self.lr


class DamagedWeight(Program):
    policy = Policy(actions=("skip", "stop"))

    def before(self, step: int) -> None:
        if step == 40:
            with torch.no_grad():
                self.model[0].weight[0, 0] = math.nan


class DamagedFromTheStart(Program):
    def before(self, step: int) -> None:
        if step == 0:
            with torch.no_grad():
                self.model[0].weight[0, 0] = math.nan


class Transient(Program):
    """Fails once, and does not when it is replayed."""

    policy = STOP
    fired = False

    def loss(self, batch: Batch, step: int) -> Tensor:
        loss = super().loss(batch, step)
        if step == 40 and not self.fired:
            self.fired = True
            return loss * math.nan
        return loss


@pytest.mark.parametrize(
    ("program", "restart"),
    [
        (DivergesAtOnce, "change-code"),
        (DivergesLater, "same-fault"),
        (DividesByZero, "same-fault"),
        (BadSamples, "same-fault"),
        (InfiniteRate, "same-fault"),
        (DamagedWeight, "same-fault"),
        (DamagedFromTheStart, "change-code"),
        (Transient, "helps"),
    ],
)
def test_restart_comes_to_what_the_line_said(
    program: Callable[[], Program],
    restart: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    first = program().run(tmp_path)
    assert first is not None and first.restart == restart
    # quiet: nothing but the line
    lines = [line for line in capfd.readouterr().err.splitlines() if "HALTED" in line]
    assert len(lines) == 1
    assert f"restart={restart} state={first.state or 'none'}" in lines[0]
    if restart == "change-code":
        assert first.state is None
    else:
        assert first.state is not None and stepguard.verify(first.state).ok
    again = program().run(tmp_path)
    if restart == "helps":
        assert again is None
    else:
        assert again is not None and again.restart == restart
        assert [finding.code for finding in again.incident.findings[:1]] == [
            finding.code for finding in first.incident.findings[:1]
        ]


def test_run_without_a_folder_has_nothing_to_restart_from() -> None:
    halted = DividesByZero().run(None)
    assert halted is not None and halted.state is None and halted.restart == "change-code"
    assert "50% are allowed (Policy.max_lost_share)" in str(halted)


def test_bad_sample_is_passed_over_by_a_restart_that_resumes_the_loader(tmp_path: Path) -> None:
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    rows[17] = math.nan

    def attempt() -> TrainingHalted | None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
        config = quiet(run_dir=tmp_path, policy=STOP, locate=True)
        with Guard(model, optimizer, loader=loader, config=config) as guard:
            if (tmp_path / "checkpoints" / "last-good").exists():
                guard.restore()
            try:
                for batch in guard.loader:
                    guard.step(lambda x: model(x).square().mean(), batch)
            except TrainingHalted as halted:
                return halted
        return None

    first = attempt()
    assert first is not None and first.restart == "helps"
    assert attempt() is None


def test_stop_of_a_watched_loop_prints_the_line_where_everything_is_quiet(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=quiet(policy=STOP)):
        loss = model(torch.full((2, 6), math.nan)).sum()
        with pytest.raises(TrainingHalted):
            loss.backward()
            optimizer.step()
    line = capfd.readouterr().err.splitlines()[0]
    assert line.startswith("stepguard: HALTED step=0") and line.endswith(
        "restart=change-code state=none"
    )


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]


def _launched(script: Path, run_dir: Path) -> Ended:
    words = ["-m", "stepguard", "run", "--run-dir", str(run_dir), "--restore", "auto"]
    done = forked.python([*words, str(script)])
    return Ended(done.returncode, [n for n in done.stderr.splitlines() if "HALTED" in n])


def test_launched_run_that_diverges_at_once_says_twice_that_it_has_to_be_changed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(),"
        " torch.nn.Linear(16, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=10.0)\n"
        "for _ in range(200):\n"
        "    x = torch.randn(8, 4)\n"
        "    optimizer.zero_grad()\n"
        "    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    for _ in range(2):
        ended = _launched(script, tmp_path / "run")
        assert ended.code == 3 and len(ended.lines) == 1
        assert ended.lines[0].endswith("cause=SG505 restart=change-code state=none")


# --- the user's loggers


FEW = grouped(batches(6), 1)


class Memory(Sink):
    """Keeps what it hears, and fails when told to."""

    def __init__(self, fails_in: str = "") -> None:
        self.heard: list[str] = []
        self._fails_in = fails_in

    def step(self, reading: Reading, committed: bool) -> None:
        self._hear("step", f"step {reading.step}" + ("" if committed else " skipped"))

    def incident(self, incident: Incident) -> None:
        self._hear("incident", f"incident {incident.step}")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._hear("note", kind)

    def close(self) -> None:
        self._hear("close", "close")

    def _hear(self, kind: str, said: str) -> None:
        self.heard.append(said)
        if kind == self._fails_in:
            raise OSError("no route to the dashboard")


def scene() -> Scene:
    model = noisy_net()
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def with_bad_step(at: int) -> list[tuple[Any, ...]]:
    return [(poisoned(micro[0]),) if index == at else micro for index, micro in enumerate(FEW)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_sink_hears_every_step_and_the_incident_once_it_is_dealt_with(loop: str) -> None:
    memory = Memory()
    LOOPS[loop](scene(), with_bad_step(2)[:4], quiet(sinks=(memory,)))
    assert memory.heard == [
        "step 0",
        "step 1",
        "step 2 skipped",
        "incident 2",
        "step 3",
        "end",
        "close",
    ]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("fails_in", ["step", "incident", "note", "close"])
def test_a_sink_that_fails_is_dropped_once_and_the_run_is_the_same(
    loop: str, fails_in: str, tmp_path: Path
) -> None:
    broken, healthy = Memory(fails_in), Memory()
    steps, guarded = with_bad_step(2), scene()
    with pytest.warns(
        SinkDropped, match="Memory failed and is dropped.*no route to the dashboard"
    ) as said:
        LOOPS[loop](guarded, steps, quiet(sinks=(broken, healthy), run_dir=tmp_path))
    reference = scene()
    LOOPS[loop](reference, steps, quiet())
    assert len(said) == 1
    assert not difference(state_of(guarded), state_of(reference))
    assert "end" in healthy.heard
    assert healthy.heard[-1] == "close"
    assert "no route to the dashboard" in str(read_run(tmp_path).notes)


def test_sinks_that_fail_together_are_all_dropped() -> None:
    broken = Memory("step"), Memory("note"), Memory("step")
    healthy = Memory()
    with pytest.warns(SinkDropped) as said:
        LOOPS["step"](scene(), FEW[:3], quiet(sinks=(*broken, healthy)))
    assert len(said) == 3
    assert [word for word in healthy.heard if word.startswith("step")] == [
        "step 0",
        "step 1",
        "step 2",
    ]


def test_the_journal_names_the_sinks_and_copies_none(tmp_path: Path) -> None:
    class Uncopyable(Memory):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("a connection cannot be copied")

    LOOPS["step"](scene(), FEW[:1], quiet(sinks=(Uncopyable(),), run_dir=tmp_path))
    assert read_run(tmp_path).header["config"]["sinks"] == ["Uncopyable"]


@pytest.mark.parametrize(
    "sinks", [[Memory()], (print,), Memory()], ids=["list", "function", "bare"]
)
def test_what_is_no_tuple_of_sinks_is_refused(sinks: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"GuardConfig.sinks=.* must be a tuple of stepguard.integrations.sinks.Sink",
    ):
        GuardConfig(sinks=sinks)

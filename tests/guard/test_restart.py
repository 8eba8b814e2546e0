"""What the line for launchers says of a restart is what a restart comes to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import forked
import stepguard
from scenes import plain_net, quiet
from stepguard import Guard, Policy, TrainingHalted

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
    def loss(self, batch: Batch, step: int) -> Tensor:
        loss = super().loss(batch, step)
        return loss / torch.zeros(()) if step >= 20 else loss


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

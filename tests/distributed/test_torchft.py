"""Two replicas of torchft: a veto is a vote, so replicas never part. Skipped without torchft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepguard
from distributed.launch import PATHS
from distributed.matrix import cell
from stepguard import Guard
from stepguard._errors import ConfigError
from stepguard.engine.drivers.scaler import voting_manager

WORKER = Path(__file__).with_name("torchft_worker.py")
TORCHFT = "torchft (`guard.step`)"
SECONDS = 120


def _replicas(out: Path, trouble: str) -> list[dict[str, Any]]:
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in ("0", "1"):
            arguments = [str(WORKER), str(out), number, lighthouse.address(), trouble]
            with (out / f"log.{number}").open("w") as log:
                running.append(
                    subprocess.Popen(
                        [sys.executable, *arguments], env=environment, stdout=log, stderr=log
                    )
                )
        for process in running:
            process.wait(SECONDS)
    finally:
        for process in running:
            process.kill()
            process.wait()
        lighthouse.shutdown()
    logs = "\n".join((out / f"log.{number}").read_text()[-1500:] for number in (0, 1))
    files = [out / f"{trouble}.{number}.pt" for number in (0, 1)]
    assert all(file.exists() for file in files), logs
    return [torch.load(file, weights_only=False) for file in files]


@cell(TORCHFT, "healthy")
@pytest.mark.process
def test_healthy_replicas_commit_every_step(tmp_path: Path) -> None:
    for replica in _replicas(tmp_path, "none"):
        assert replica["committed"] == [True] * 6
        assert replica["incidents"] == [] and replica["armed"]


@cell(TORCHFT, "NaN", "alone")
@pytest.mark.process
@pytest.mark.parametrize("trouble", ["input", "loss"])
def test_replica_that_vetoes_is_healed_and_does_not_part(tmp_path: Path, trouble: str) -> None:
    first, second = _replicas(tmp_path, trouble)
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert all(bool(weight.isfinite().all()) for weight in first["weights"])
    assert first["armed"] and second["armed"]
    assert first["step"] == second["step"] == 6
    assert [decision.action for *_, decision in second["incidents"]] == ["skip"]


class Manager:
    """What a guard asks of torchft's manager."""

    def should_commit(self) -> bool:
        return True

    def report_error(self, error: Exception) -> None:
        raise error


class Voting(torch.optim.Optimizer):
    """Built as torchft builds its wrapper: without the constructor of torch's class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optim = inner
        self.manager = Manager()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optim.param_groups


def test_watched_loop_of_a_voting_optimizer_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = Voting(torch.optim.SGD(model.parameters(), lr=0.1))
    assert voting_manager(optimizer) is optimizer.manager
    with pytest.raises(ConfigError, match=r"Voting asks its workers .* guard\.step"):
        stepguard.watch(model, optimizer)
    Guard(model, optimizer).close()

"""Real signals to real ranks under torchrun: all save the same step, whoever got the signal."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import forked
import stepguard
from distributed.launch import environment
from stepguard import GuardConfig
from stepguard.checkpoints import Store
from stepguard.guard import GRACE_SHARE

WORKER = Path(__file__).with_name("signal_worker.py")
WAITING = Path(__file__).with_name("stuck_worker.py")
SECONDS = 90
"""After which a test gives up."""


def start(out: Path, engine: str, loop: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with (out / "log").open("w") as stream:
        return subprocess.Popen(
            [*command, "2", str(WORKER), str(out), engine, loop],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )


def pipes(out: Path) -> list[int]:
    """Where each rank writes its process id once it trains."""
    paths = [out / f"ready.{rank}" for rank in (0, 1)]
    for path in paths:
        os.mkfifo(path)
    return [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in paths]


def process_ids(ready: list[int], out: Path) -> list[int]:
    found = []
    for pipe in ready:
        assert select.select([pipe], [], [], SECONDS)[0], (out / "log").read_text()
        found.append(int(os.read(pipe, 20)))
        os.close(pipe)
    return found


def assert_one_step_saved(out: Path) -> None:
    ends = [out / f"ended.{rank}" for rank in (0, 1)]
    assert all(path.exists() for path in ends), (out / "log").read_text()
    first, second = [path.read_text().split() for path in ends]
    assert first == second and first[1] in ("143", "130")
    (entry,) = Store(out / "run" / "checkpoints").list()
    assert entry.good and entry.step == int(first[0])
    assert stepguard.verify(entry.path).ok


@pytest.mark.parametrize(
    ("number", "loop"),
    # a terminal sends Ctrl+C to torchrun, which passes it on, and to the ranks themselves
    [(signal.SIGTERM, "step"), (signal.SIGINT, "watch")],
)
def test_signal_to_torchrun_saves_one_step_on_all_ranks(
    number: int, loop: str, tmp_path: Path
) -> None:
    ready = pipes(tmp_path)
    process = start(tmp_path, "ddp", loop)
    try:
        process_ids(ready, tmp_path)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert_one_step_saved(tmp_path)


def test_signal_to_one_rank_saves_one_step_on_all_ranks(tmp_path: Path) -> None:
    ready = pipes(tmp_path)

    def send() -> None:
        os.kill(process_ids(ready, tmp_path)[1], signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    words = [str(WORKER), str(tmp_path), "fsdp2", "watch"]
    forked.logged(words, 2, tmp_path / "log", environment(), SECONDS)
    sender.join()
    assert_one_step_saved(tmp_path)


def test_rank_that_waits_in_a_collective_ends_by_the_signal(tmp_path: Path) -> None:
    """Where Python runs no handler."""
    log = tmp_path / "log"
    began = time.monotonic()
    assert forked.logged([str(WAITING), str(tmp_path)], 2, log, environment(), 120) == 1
    assert time.monotonic() - began > GuardConfig().ranks.timeout / GRACE_SHARE
    assert "rank 0 ended with exit code -15" in log.read_text()

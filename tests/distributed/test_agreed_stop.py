"""Real signals to real ranks under torchrun: all save the same step, whoever got the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stepguard
from distributed.launch import PATHS
from stepguard.checkpoints import Store

WORKER = Path(__file__).with_name("signal_worker.py")
SECONDS = 90
"""After which a test gives up."""


def start(out: Path, engine: str, loop: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    with (out / "log").open("w") as stream:
        return subprocess.Popen(
            [*command, "2", str(WORKER), str(out), engine, loop],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def wait_for(paths: list[Path], process: subprocess.Popen[bytes], out: Path) -> None:
    until = time.monotonic() + SECONDS
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < until and process.poll() is None, (out / "log").read_text()
        os.sched_yield()


def send(whom: str, number: int, out: Path, process: subprocess.Popen[bytes]) -> None:
    if whom == "torchrun":
        process.send_signal(number)
    elif whom == "group":
        # as a terminal does: torchrun, which passes it on, and the ranks themselves
        os.killpg(process.pid, number)
    else:
        os.kill(int((out / "ready.1").read_text()), number)


@pytest.mark.parametrize(
    ("whom", "number", "engine", "loop"),
    [
        ("torchrun", signal.SIGTERM, "ddp", "step"),
        ("group", signal.SIGINT, "ddp", "watch"),
        ("rank 1", signal.SIGTERM, "fsdp2", "watch"),
    ],
)
def test_signal_saves_one_step_on_all_ranks(
    whom: str, number: int, engine: str, loop: str, tmp_path: Path
) -> None:
    process = start(tmp_path, engine, loop)
    try:
        wait_for([tmp_path / f"ready.{rank}" for rank in (0, 1)], process, tmp_path)
        send(whom, number, tmp_path, process)
        process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tmp_path / "log").read_text()
    ends = [(tmp_path / f"ended.{rank}") for rank in (0, 1)]
    assert all(path.exists() for path in ends), said
    first, second = [path.read_text().split() for path in ends]
    assert first == second and first[1] in ("143", "130")
    (entry,) = Store(tmp_path / "run" / "checkpoints").list()
    assert entry.good and entry.step == int(first[0])
    assert stepguard.verify(entry.path).ok

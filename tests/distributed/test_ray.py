"""Ray Train needs no adapter: its workers are ranks of a process group. Skipped without ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepguard
from distributed.launch import PATHS

WORKER = Path(__file__).with_name("ray_worker.py")


@pytest.mark.process
def test_bad_batch_of_one_worker_is_skipped_by_all(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="ray[train] is not installed")
    # a working folder of its own: ray packs the one it is started in for its workers
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env={**environment, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"ray.{r}.pt", weights_only=False) for r in (0, 1))
    for worker in (first, second):
        assert worker["incidents"] == [(3, 1, (2,))] and worker["armed"]
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert stepguard.verify(tmp_path / "run" / "checkpoints").ok

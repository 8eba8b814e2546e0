"""Ray Train needs no adapter: its workers are ranks of a process group. Skipped without ray.

pip install 'ray[train]' && pytest tests/distributed/test_ray.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepguard
from distributed.launch import PATHS
from distributed.matrix import cell

WORKER = Path(__file__).with_name("ray_worker.py")
RAY = "Ray Train (`TorchTrainer`)"
SHOWN = ("healthy", "NaN", "clip", "save", "restore", "rewind")


def shown(test: object) -> object:
    """The one test shows all these cells: to start ray takes far longer than what it does."""
    for column in SHOWN:
        test = cell(RAY, column)(test)
    return test


@shown
@pytest.mark.process
def test_workers_of_ray_are_guarded_as_ranks_are(tmp_path: Path) -> None:
    # not imported here: it would leave its marks on this process
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray[train] is not installed")
    # a working folder of its own: ray packs the one it is started in for its workers
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env={**environment, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        found = torch.load(tmp_path / f"ray.{rank}.pt", weights_only=False)
        same = {
            name: all(map(torch.equal, found[name]["weights"], found[beside]))
            for name, beside in (
                ("none", "bare"),
                ("input", "without"),
                ("weight", "bare"),
                ("restored", "bare"),
            )
        }
        assert all(same.values()), same
        assert found["none"]["told"] == []
        assert found["input"]["told"] == [(3, "skip", 1)]
        assert [action for _, action, _ in found["weight"]["told"]] == ["rewind"]
        assert found["restored"]["first"] == 5
        assert all(found[name]["armed"] for name in ("none", "input", "weight", "restored"))
    assert stepguard.verify(tmp_path / "none" / "checkpoints").ok

"""One cell of each fault of a rank: nobody hangs, and no weight of a living rank is NaN."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.rank_faults import QUICK

ROOT = Path(__file__).parents[2]


def test_every_fault_ends_in_time_with_finite_weights(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.rank_faults", "--quick", "--json", str(file)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    found = json.loads(file.read_text())
    assert len(found) == len(QUICK)
    assert all(cell["good"] for cell in found)

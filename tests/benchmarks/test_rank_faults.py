"""One cell of each fault of a rank: nobody hangs, and no weight of a living rank is NaN."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.rank_faults import QUICK

import forked

ROOT = Path(__file__).parents[2]


def test_every_fault_ends_in_time_with_finite_weights(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["-m", "benchmarks.rank_faults", "--quick", "--json", str(file)]
    ran = forked.python(words, folder=ROOT, seconds=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    found = json.loads(file.read_text())
    assert len(found) == len(QUICK)
    assert all(cell["good"] for cell in found)

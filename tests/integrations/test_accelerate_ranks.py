"""Two gloo ranks under `torchrun`: they skip together, name the rank, and refuse a save together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_ranks_skip_name_and_refuse_together(tmp_path: Path) -> None:
    script = Path(__file__).with_name("accelerate_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, str(script), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = sorted(
        (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")), key=lambda s: s["rank"]
    )
    assert len(said) == 2
    expected = [{"step": 2, "rank": 1, "micro": 1, "samples": [1], "tensor": "batch:x"}]
    assert [s["incidents"] for s in said] == [expected, expected]
    assert [s["refused"] for s in said] == [True, True]
    assert [s["bad"] for s in said] == [0, 0]
    assert said[0]["weights"] == said[1]["weights"]
    assert not (tmp_path / "state").exists()
    assert said[0]["lr_steps"] == said[1]["lr_steps"] == 6

"""SIGTERM ends a rank that waits in a collective, where Python runs no handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distributed.launch import PATHS
from stepguard import GuardConfig
from stepguard.guard import GRACE_SHARE

WORKER = Path(__file__).with_name("stuck_worker.py")


def test_rank_that_waits_for_another_ends_by_the_signal(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(tmp_path)]
    began = time.monotonic()
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    try:
        assert ranks[0].wait(120) == -signal.SIGTERM
        assert time.monotonic() - began > GuardConfig().ranks.timeout / GRACE_SHARE
    finally:
        for process in ranks:
            process.kill()
            process.wait()

"""SIGTERM ends a rank that waits in a collective, where Python runs no handler."""

from __future__ import annotations

import time
from pathlib import Path

import forked
from distributed.launch import environment
from stepguard import GuardConfig
from stepguard.guard import GRACE_SHARE

WORKER = Path(__file__).with_name("stuck_worker.py")


def test_rank_that_waits_for_another_ends_by_the_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    began = time.monotonic()
    assert forked.logged([str(WORKER), str(tmp_path)], 2, log, environment(), 120) == 1
    assert time.monotonic() - began > GuardConfig().ranks.timeout / GRACE_SHARE
    assert "rank 0 ended with exit code -15" in log.read_text()

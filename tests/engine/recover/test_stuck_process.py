"""A watch over signals leaves no thread, no file and no setting behind.

A process that really waits: tests/distributed/test_stuck.py.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest

from stepguard.engine.recover import signals
from stepguard.engine.recover.signals import StuckProcess

pytestmark = pytest.mark.usefixtures("interruptible")
GRACE = 30.0


def wakeup_file() -> int:
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    return current


def test_everything_is_as_before_afterwards() -> None:
    threads, before = threading.active_count(), wakeup_file()
    watch = StuckProcess(lambda number: True, GRACE)
    assert wakeup_file() != -1
    watch.close()
    assert threading.active_count() == threads and wakeup_file() == before


def test_file_of_an_event_loop_stays_its_own() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        watch = StuckProcess(lambda number: True, GRACE)
        assert wakeup_file() == writes
        watch.close()
        assert wakeup_file() == writes
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("why", ["acted", "harmless"])
def test_process_that_acts_or_would_go_on_is_not_ended(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    asked = threading.Event()
    monkeypatch.setattr(signals, "_die_of", ended.append)

    def ends(number: int) -> bool:
        asked.set()
        return why == "acted"

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    watch = StuckProcess(ends, GRACE)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.wait(20)
        watch.acted()
    finally:
        watch.close()
        signal.signal(signal.SIGUSR1, before)
    assert ended == []

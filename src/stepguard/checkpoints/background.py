"""Save while training continues: one writer thread, one save at a time, faults only reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from stepguard.checkpoints.seal import Health
from stepguard.checkpoints.store import Store

NICENESS = 5
"""The writer gets a quarter of a core that training wants too; with less it starves."""


class Background:
    """Runs each save in a thread of its own, for which an interpreter that ends waits."""

    def __init__(
        self,
        store: Store,
        say: Callable[[str], None],
        sealed: Callable[[int, Path, Health], None] | None = None,
    ) -> None:
        self._store = store
        self._say = say
        self._sealed = sealed
        store.say = say
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        self._refused = 0

    def offer(
        self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], health: Health
    ) -> bool:
        """Start a save; False if the one before is still being written, for nothing is queued.

        The tensors are not copied; they must not be written to until `idle()`.
        """
        tensors = dict(tensors)
        facts = dict(facts)

        def save() -> Path:
            path = self._store.save(step, tensors, facts, health)
            if self._sealed is not None:
                self._sealed(step, path, health)
            return path

        return self.offer_job(step, save)

    def offer_job(self, step: int, job: Callable[[], Path | None]) -> bool:
        """Start a save of any kind, which returns the path of what it wrote; False as `offer`."""
        if not self.idle():
            self._refused += 1
            return False
        self._saved = None
        self._thread = threading.Thread(
            target=self._save, args=(step, job), name=f"stepguard-save-{step}"
        )
        self._thread.start()
        return True

    def left_out(self) -> None:
        """Count a save that could not begin because one is still being written."""
        self._refused += 1

    def idle(self) -> bool:
        """Is nothing being written?"""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait for the running save; returns the path of the last one, None if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._saved

    def close(self) -> None:
        """Finish the running save."""
        self.wait()

    def _save(self, step: int, job: Callable[[], Path | None]) -> None:
        _lower_priority()
        try:
            self._saved = job()
        except Exception as fault:
            self._say(f"checkpoint of step {step} NOT saved, training goes on: {fault}")
        if self._refused:
            later = "1 later save was"
            if self._refused > 1:
                later = f"{self._refused} later saves were"
            self._say(f"saving step {step} took so long that {later} left out.")
            self._refused = 0


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):
        # only on Linux has a thread a priority of its own; elsewhere training would slow down too
        if os.uname().sysname == "Linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

"""Shared by the tests of the store: a store in a folder, states, a child process that can die."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.disk.states import GOOD, facts_at, state_at, step_of

from stepguard.checkpoints import Opened, Store

SIZE = 64


def saved(store: Store, *steps: int, **health: Any) -> None:
    """Save the states of these steps."""
    for step in steps:
        store.save(step, state_at(step, SIZE), facts_at(step), GOOD)


def held(opened: Opened) -> int:
    """The step of an opened checkpoint, once every tensor and fact equals what was saved."""
    assert step_of(opened.tensors) == opened.step
    assert opened.facts == facts_at(opened.step)
    return opened.step


def names(folder: Path) -> list[str]:
    """Everything in a folder of checkpoints but the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".writer.lock")


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; its exit code, negative for the signal that killed it."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

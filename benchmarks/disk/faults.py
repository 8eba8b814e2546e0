"""Disks with faults: each is the real one with another `perform`."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

from stepguard.state.files import Disk, Kind, Operation

Result = TypeVar("Result")
Moment = Literal["before", "middle", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "middle", "after")


class Recorder(Disk):
    """Carries everything out, and remembers it with a copy of the bytes."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        result = act()
        data = None if operation.data is None else memoryview(bytes(operation.data))
        self.operations.append(replace(operation, data=data))
        return result


class Dying(Disk):
    """The process is killed at one numbered operation: before it, after it, or with half of a write
    done.
    """

    def __init__(self, number: int, moment: Moment) -> None:
        self.left, self.moment = number, moment

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        self.left -= 1
        if self.left >= 0:
            return act()
        if self.moment == "after":
            act()
        if self.moment == "middle" and operation.data is not None:
            _write_half(operation)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class Failing(Disk):
    """Operations of some kinds fail, from the n-th on or once, as a full, broken or read-only disk
    does.
    """

    def __init__(
        self, *kinds: Kind, number: int = 0, code: int = errno.EIO, times: int | None = None
    ) -> None:
        self.kinds, self.left, self.code, self.times = kinds, number, code, times
        self.failed = 0

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        if operation.kind in self.kinds and (self.times is None or self.failed < self.times):
            self.left -= 1
            if self.left < 0:
                self.failed += 1
                if operation.data is not None:
                    _write_half(operation)
                raise OSError(self.code, os.strerror(self.code), str(operation.path))
        return act()


class Lying(Disk):
    """Flips one bit of the n-th write and says nothing."""

    def __init__(self, number: int) -> None:
        self.left = number

    def perform(self, operation: Operation, act: Callable[[], Result]) -> Result:
        result = act()
        if operation.data is not None:
            self.left -= 1
            if self.left == -1:
                flipped = bytes([operation.data[0] ^ 1])
                descriptor = os.open(operation.path, os.O_WRONLY)
                os.pwrite(descriptor, flipped, operation.offset)
                os.close(descriptor)
        return result


def _write_half(operation: Operation) -> None:
    assert operation.data is not None
    descriptor = os.open(operation.path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, operation.data[: len(operation.data) // 2], operation.offset)
    finally:
        os.close(descriptor)

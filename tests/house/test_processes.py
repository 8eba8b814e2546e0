"""The quick lane leaves out what starts a process, told from the code that a test reaches."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from torch.utils.data import DataLoader

from processes import reaches_process


def _runs() -> None:
    subprocess.run(["true"], check=True)


def _forks() -> int:
    return os.fork()


def _workers() -> DataLoader[int]:
    return DataLoader([1, 2], num_workers=1)  # type: ignore[arg-type]


@contextmanager
def _managed() -> Iterator[None]:
    _runs()
    yield


class _Runner:
    def start(self) -> None:
        _runs()


def _nested() -> None:
    def inside() -> None:
        _runs()

    inside()


def _by_class() -> None:
    _Runner().start()


def _itself(depth: int) -> int:
    return _itself(depth - 1) if depth else 0


def _plain() -> str:
    return os.fspath("a")


@pytest.mark.parametrize(
    "function", [_runs, _forks, _workers, _managed, _nested, _by_class, partial(_runs)]
)
def test_function_that_leads_to_a_process_is_found(function: object) -> None:
    assert reaches_process(function)


@pytest.mark.parametrize("function", [_plain, _itself, len, None, 3, partial(_plain)])
def test_other_function_is_not(function: object) -> None:
    assert not reaches_process(function)

"""Tests under `on_ranks` run on the ranks, not here: see `launch.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launch import outcome_of


@pytest.fixture
def folder() -> Path:
    """Stand in for the folder that the ranks of a test share."""
    return Path()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not hasattr(pyfuncitem.function, "ranks"):
        return None
    factory = pyfuncitem._request.getfixturevalue("tmp_path_factory")
    why = outcome_of(pyfuncitem, factory)
    if why:
        pytest.fail(why, pytrace=False)
    return True

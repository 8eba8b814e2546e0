"""Every test is seeded alike, and one that leaves a hook, patch, thread, variable or mode behind
fails.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from tqdm import tqdm

from leaks import leaks_since, look, seed, unseed

pytest_plugins = ["pytester"]

os.environ["COLUMNS"] = (
    "100"  # the window and the colours of whoever runs the tests are no part of them
)
for _variable in (
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "TTY_COMPATIBLE",
    "PY_COLORS",
):
    os.environ.pop(_variable, None)
os.environ["TERM"] = "xterm"
torch.set_num_threads(1)
tqdm.monitor_interval = (
    0  # torch.compile draws a bar, whose thread would outlive the first test that compiles
)
hypothesis.settings.register_profile("house", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def _surroundings_stay() -> Iterator[None]:
    _forget_compiled()
    randomness = seed()
    before = look()
    yield
    found = leaks_since(before)
    unseed(randomness)
    if found:
        pytest.fail("the test leaks\n  " + "\n  ".join(found), pytrace=False)


def _forget_compiled() -> None:
    """A guard asks whether anything was compiled in its process; a test asks only for what it
    compiled itself.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        torch._dynamo.reset()
        utils.counters.clear()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A test run in the background of a shell inherits an ignored SIGINT, which a guard leaves
    ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

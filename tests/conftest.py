"""Seed every test alike, and fail one that leaves a hook, patch, thread, variable or mode behind.

Also sorts out the tests that start a process, which `make quick` leaves out.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from tqdm import tqdm

import processes
from browser import NO_BROWSER, NO_SITE
from forked import DOCUMENTED, FULL, TESTS
from leaks import leaks_since, look, seed, unseed

pytest_plugins = ["pytester"]

# results must not depend on the window and the colours of the terminal that runs the tests
os.environ["COLUMNS"] = "100"
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
# the key that signs capsules belongs to whoever runs the tests, not to the tests
if "stepguard-tests-" not in os.environ.get("XDG_CONFIG_HOME", ""):
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="stepguard-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
# containers set it; every Python that the tests start would compile the package again, and every
# worker the tests: a third of the time of `make quick`
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# huggingface_hub reads these when it is first imported: it must look nothing up and send nothing
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
torch.set_num_threads(1)
# torch.compile draws a bar, whose thread would outlive the first test that compiles
tqdm.monitor_interval = 0
hypothesis.settings.register_profile("house", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("house")


QUICK = "not process and not slow"
"""The marker expression of `make quick`."""
NOT_QUICK = ("benchmarks", "integrations", "recipes", "cli/test_agents.py")
"""Parts of tests that `make quick` does not even import: that alone takes half a minute."""
LANES = {
    "full": "only at full length, with STEPGUARD_FULL=1 (`make test-all`)",
    "documented": "a documented command that takes long: `.ci/run` and `make test-all`",
}
"""Markers of tests that `make test` leaves to another lane."""
QUICK_IMPORTED = (
    "torch._dynamo",
    "matplotlib.pyplot",
    "hypothesis",
    "nbclient",
    "starlette.testclient",
    "transformers.tokenization_utils_base",
)
"""What `make quick` imports while it is collected."""
IMPORTED = (
    *QUICK_IMPORTED,
    "pandas",
    "wandb",
    "datasets",
    "peft",
    "accelerate",
    "transformers.trainer",
    "lightning",
    "mcp",
)
"""What the whole suite imports then; a part of it may need none of these."""
_left_out = 0
_full_length = 0


def pytest_configure(config: pytest.Config) -> None:
    whole = config.args == config.getini("testpaths")
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        # not where xdist only hands out what its workers run
        quick = config.option.markexpr == QUICK
        _freeze_libraries(() if not whole else QUICK_IMPORTED if quick else IMPORTED)
    # A shell that starts the suite in the background ignores Ctrl+C, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, text in LANES.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    if config.option.markexpr == QUICK:
        processes.watch_for_processes()


def _freeze_libraries(names: Sequence[str]) -> None:
    """Keep what libraries define out of garbage collection, and out of `gc.get_objects`.

    Tests collect often, and the guard asks for all objects at an incident; most of a test's time
    went into functions of torch. What the tests themselves define stays visible.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(name)
    if not gc.get_freeze_count():  # a pytest inside a test must not freeze what the tests define
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != QUICK or TESTS not in collection_path.parents:
        return None
    return str(collection_path.relative_to(TESTS)) in NOT_QUICK or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # before pytest's own hook, which deselects by marker
    processes.mark(items)
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("documented")
    global _full_length
    later = {"full": not FULL, "documented": not DOCUMENTED}
    long = [
        item
        for item in items
        if any(later[name] and item.get_closest_marker(name) for name in LANES)
    ]
    if long:
        _full_length = len(long)
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what pytest holds for each test out of `gc.get_objects`: 25 objects, 170 000 in all.

    What it only refers to, such as the parameters of a test, stays visible.
    """
    untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    untrack.argtypes, untrack.restype = [ctypes.py_object], None
    waiting: list[object] = list(session.items)
    while waiting:
        one = waiting.pop()
        if not gc.is_tracked(one):
            continue
        untrack(one)
        if isinstance(one, dict | list | tuple | set):
            continue
        referents = [one.__dict__] if hasattr(one, "__dict__") else []
        for held in [*referents, *gc.get_referents(one, *referents)]:
            if isinstance(held, dict | list | tuple | set) or _is_pytests(held):
                waiting.append(held)


def _is_pytests(value: object) -> bool:
    return type(value).__module__.startswith("_pytest.")


def pytest_deselected(items: list[pytest.Item]) -> None:
    global _left_out
    _left_out += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # under xdist the workers collect, and the process that prints does not
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = _left_out
        session.config.workeroutput["full_length"] = _full_length


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global _left_out, _full_length
    said = getattr(node, "workeroutput", {})
    _left_out = said.get("left_out", _left_out)
    _full_length = said.get("full_length", _full_length)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr == QUICK:
        folders = ", ".join(f"tests/{name}" for name in NOT_QUICK)
        said = f"LEFT OUT: {_left_out} tests that start a process or are slow, and {folders}"
        terminalreporter.write_line(f"{said}; `make test` runs them too", yellow=True)
    elif _full_length:
        said = f"LEFT OUT: {_full_length} tests of longer lanes; `make test-all` runs them too"
        terminalreporter.write_line(said, yellow=True)
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if any(NO_SITE in reason for reason in skipped):
        terminalreporter.write_line(f"LEFT OUT: {NO_SITE}", red=True)
    without = sum(NO_BROWSER in reason for reason in skipped)
    if without:
        said = f"LEFT OUT: {without} browser tests, for {NO_BROWSER} was found"
        terminalreporter.write_line(f"{said}; `make browser` installs it", red=True)


@pytest.fixture(autouse=True)
def _quick_test_starts_no_process() -> Iterator[None]:
    before = processes.started()
    yield
    found = processes.starts_since(before)
    if found:
        # only noted in the quick lane
        pytest.fail(f"mark it `process`: the test has started {found}", pytrace=False)


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


@pytest.fixture(autouse=True)
def _slow_machine_gives_the_same_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give locating ten times its 0.3 s; test_locate_budget.py tests the limit by a clock."""
    budget: Any = sys.modules.get("stepguard.locate.replay")
    if budget is None or request.path.name == "test_locate_budget.py":
        yield
        return
    usual = budget.FLOOR
    budget.FLOOR = 10 * usual
    yield
    budget.FLOOR = usual


def _forget_compiled() -> None:
    """Forget graphs of earlier tests: a guard asks whether its process has compiled any."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        torch._dynamo.reset()
        utils.counters.clear()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Ctrl+C, which a shell's background job inherits as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

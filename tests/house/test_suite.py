"""What the tests themselves rest on: leaks are caught, processes are found, a forked Python ends as
a fresh one, and a shortened product keeps its pairs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim import optimizer as optim_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import forked
import leaks
from forked import FULL
from pairwise import pairs, pairwise
from processes import reaches_process

CONFTEST = Path(__file__).parents[1] / "conftest.py"
never = threading.Event()


def _leave_thread() -> None:
    threading.Thread(target=never.wait, daemon=True).start()


def _leave_process_group() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _leave_patch(owner: object, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, lambda *args, **kwargs: None)


LEAVE: dict[str, Callable[[], object]] = {
    "global module hooks": lambda: torch.nn.modules.module.register_module_forward_hook(
        lambda *a: None
    ),
    "global optimizer hooks": lambda: optim_module.register_optimizer_step_pre_hook(
        lambda *a: None
    ),
    "sys.excepthook": _leave_patch(sys, "excepthook"),
    "os.environ": lambda: os.environ.__setitem__("STEPGUARD_LEAKED", "1"),
    "working directory": lambda: os.chdir("/"),
    "sys.argv": lambda: sys.argv.append("leaked"),
    "threads": _leave_thread,
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, lambda *a: None),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic mode": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "torch threads": lambda: torch.set_num_threads(2),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch modes": lambda: TorchDispatchMode().__enter__(),
    "process group": _leave_process_group,
    **{
        leaks._patch_probe(owner, name).name: _leave_patch(owner, name)
        for owner, name in leaks.PATCHABLE
    },
}


def test_every_kind_of_leak_is_tried_here() -> None:
    assert LEAVE.keys() == leaks.PROBES.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    "kinds", [[kind] for kind in LEAVE] if FULL else [list(LEAVE)], ids=lambda kinds: kinds[-1]
)
def test_leak_is_named_and_undone(kinds: list[str]) -> None:
    before = leaks.look()
    for kind in kinds:
        LEAVE[kind]()
    try:
        found = leaks.leaks_since(before)
    finally:
        never.set()
    assert sorted(name.partition(":")[0] for name in found) == sorted(kinds)
    assert leaks.leaks_since(before) == []
    never.clear()


def test_removed_variable_is_a_leak_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGUARD_KEPT", "1")
    before = leaks.look()
    del os.environ["STEPGUARD_KEPT"]
    assert leaks.leaks_since(before) == ["os.environ: STEPGUARD_KEPT"]
    assert os.environ["STEPGUARD_KEPT"] == "1"


def test_thread_that_is_about_to_end_is_no_leak() -> None:
    before = leaks.look()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    release.set()
    assert leaks.leaks_since(before) == []


def test_hook_that_torch_distributed_forgets_is_not_blamed_on_the_test() -> None:
    before = leaks.look()
    _leave_process_group()
    torch.distributed.destroy_process_group()
    assert sys.excepthook.__name__ == "_distributed_excepthook"
    assert leaks.leaks_since(before) == []


def test_untouched_surroundings_are_no_leak() -> None:
    assert leaks.leaks_since(leaks.look()) == []


def test_seeding_repeats_and_undoes_itself() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    outer = leaks.seed()
    first = draw()
    inner = leaks.seed()
    assert draw() == first
    leaks.unseed(inner)
    second = draw()
    assert second != first
    leaks.unseed(outer)


def test_leaking_test_fails_and_its_successor_does_not(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        """
        import os, torch

        def test_leaks():
            torch.set_default_dtype(torch.float64)
            os.environ["STEPGUARD_LEAKED"] = "1"

        def test_clean():
            assert torch.get_default_dtype() is torch.float32
            assert "STEPGUARD_LEAKED" not in os.environ
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*the test leaks*", "*os.environ: STEPGUARD_LEAKED*", "*default dtype:*float64*"]
    )


def test_suite_that_is_started_with_ctrl_c_ignored_gets_it_back(
    pytester: pytest.Pytester,
) -> None:
    """As a job in the background of a shell, or under nohup."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        """
        import signal

        def test_ctrl_c_works():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        """
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    finally:
        signal.signal(signal.SIGINT, before)


IGNORED = """
import os, signal, torch, stepguard
model = torch.nn.Linear(2, 1)
config = stepguard.GuardConfig(run_dir="run")
with stepguard.Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        guard.step(lambda batch: model(batch).square().mean(), torch.ones(4, 2))
print("trained on")
"""


def test_program_that_was_started_with_ctrl_c_ignored_trains_on_and_says_so(
    tmp_path: Path,
) -> None:
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{IGNORED}"
    ended = forked.python(["-c", code], folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "trained on\n"), ended.stderr
    assert ended.stderr.count("SIGINT was ignored when the program started") == 1


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


SCRIPT = """
import atexit, sys
atexit.register(print, "at the end")
print(__name__, __file__, sys.argv, sys.path[0], sys.stdin.read())
"""
WORDS: dict[str, list[str]] = {
    "script": ["script.py", "one", "-x"],
    "module": ["-m", "script", "one"],
    "command": ["-c", "import sys; print(sys.argv, __name__, repr(sys.path[0]))", "one"],
    "exit": ["-c", "raise SystemExit(7)"],
    "message": ["-c", "import sys; sys.exit('said')"],
    "error": ["broken.py"],
    "killed": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "interrupted": ["-c", "import os, signal; signal.raise_signal(signal.SIGTERM)"],
    "warning": ["-W", "error", "-c", "import warnings; warnings.warn('loud')"],
    "cause": ["-c", "import sys, atexit; atexit.register(lambda: print(sys.last_value)); 1 / 0"],
}


@pytest.mark.parametrize("name", WORDS)
def test_forked_python_ends_as_a_fresh_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("def fail():\n    raise KeyError('x')\n\n\nfail()\n")
    ends = [
        forked.python(WORDS[name], folder=tmp_path, given="given", fresh=fresh)
        for fresh in (False, True)
    ]
    assert vars(ends[0]) == vars(ends[1])


def test_torch_is_there_before_the_first_line_and_a_fresh_one_starts_without() -> None:
    words = ["-c", "import sys; print('torch' in sys.modules)"]
    assert forked.python(words, fresh=True).stdout == "False\n"
    if not forked.FULL:
        assert forked.python(words).stdout == "True\n"


def test_process_that_takes_too_long_is_killed_and_the_next_one_is_served() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.python(["-c", "import time; time.sleep(100)"], seconds=0.1)
    assert forked.python(["-c", "print(1)"]).stdout == "1\n"


def test_failing_rank_ends_the_others() -> None:
    code = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(100)"
    ended = forked.python(["-c", code], ranks=2)
    assert ended.returncode == 1
    if not forked.FULL:
        assert "rank 1 ended with exit code 3" in ended.stderr


ROWS = list(product("abcdefgh", (1, 2), (False, True), (None, 0.5, 1.0)))


@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_is_left_and_most_rows_are_not(seed: int) -> None:
    chosen = pairwise(ROWS, seed=seed, full=False)
    assert frozenset().union(*map(pairs, chosen)) == frozenset().union(*map(pairs, ROWS))
    assert set(chosen) < set(ROWS) and 8 * 3 <= len(chosen) <= len(ROWS) // 3
    assert chosen == sorted(chosen, key=ROWS.index) == pairwise(ROWS, seed=seed, full=False)


def test_rows_that_cannot_be_are_not_invented() -> None:
    possible = [row for row in ROWS if row[:2] != ("a", 2)]
    assert set(pairwise(possible, full=False)) < set(possible)


def test_product_of_two_stays_whole_and_so_does_everything_in_the_long_run() -> None:
    assert pairwise(product("ab", (1, 2)), full=False) == list(product("ab", (1, 2)))
    assert pairwise(ROWS, full=True) == ROWS

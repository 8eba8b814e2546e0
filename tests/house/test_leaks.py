"""The fixture that catches leaks really catches each of them."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim import optimizer as optim_module
from torch.utils._python_dispatch import TorchDispatchMode

import leaks

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
@pytest.mark.parametrize("kind", LEAVE)
def test_leak_is_named_and_undone(kind: str) -> None:
    before = leaks.look()
    LEAVE[kind]()
    try:
        found = leaks.leaks_since(before)
    finally:
        never.set()
    assert [name.partition(":")[0] for name in found] == [kind]
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

"""What a test must leave as it found it, and how to put it back so that one culprit does not fail
its successors.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optim_module

SEED = 1234
PATCHABLE: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "load_state_dict"),
    (torch.amp.GradScaler, "update"),
    (torch.optim.Optimizer, "step"),
    (clip_grad, "_get_total_norm"),
    (clip_grad, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grad_norm_"),
    (torch, "save"),
    (torch, "load"),
    (threading, "excepthook"),
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
IGNORED_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
"""Prefixes of what pytest, torch.compile and the import of Lightning set for themselves, once a
process.
"""
LASTING_HOOKS = {
    "init_process_group.<locals>._distributed_excepthook": "old_hook",
    "exit_with_code_three.<locals>.hook": "previous",
}
"""Exception hooks that must outlive what installed them, and the name each has for the hook below.
"""
GRACE = 1.0
"""Seconds a thread that is already ending gets to end."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One kind of leak: how to look, and how to undo."""

    name: str
    read: Callable[[], Any]
    undo: Callable[[Any], None]


def _hook_dicts(home: Any) -> dict[str, dict[Any, Any]]:
    return {
        name: getattr(home, name)
        for name in dir(home)
        if name.startswith("_global_") and name.endswith("hooks")
    }


def _hooks_probe(name: str, home: Any) -> Probe:
    dicts = _hook_dicts(home)

    def undo(before: dict[str, dict[Any, Any]]) -> None:
        for key, hooks in dicts.items():
            hooks.clear()
            hooks.update(before[key])

    return Probe(name, lambda: {key: dict(hooks) for key, hooks in dicts.items()}, undo)


def _patch_probe(owner: Any, name: str) -> Probe:
    label = f"{getattr(owner, '__name__', owner)}.{name}"
    return Probe(
        label, lambda: getattr(owner, name, None), lambda before: setattr(owner, name, before)
    )


def _excepthook() -> Any:
    """The hook below those that stay for good: torch.distributed's, and the one that gives a halt
    its exit code.
    """
    hook: Any = sys.excepthook
    while (below := LASTING_HOOKS.get(getattr(hook, "__qualname__", ""))) is not None:
        hook = hook.__closure__[hook.__code__.co_freevars.index(below)].cell_contents
    return hook


def _environment() -> dict[str, str]:
    return {
        key: value for key, value in os.environ.items() if not key.startswith(IGNORED_VARIABLES)
    }


def _reset_environment(before: dict[str, str]) -> None:
    for key in _environment().keys() - before.keys():
        del os.environ[key]
    os.environ.update(before)


def _threads() -> frozenset[threading.Thread]:
    """Threads started by Python; those of C++ that only passed through cannot be joined."""
    return frozenset(t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))


def _reset_signals(before: tuple[Any, ...]) -> None:
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def _pop_modes(before: tuple[int, int]) -> None:
    while torch._C._len_torch_dispatch_stack() > before[0]:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > before[1]:
        torch._C._pop_torch_function_stack()


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _reset_autocast(before: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled("cpu", before[0])
    torch.set_autocast_dtype("cpu", before[1])


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        _hooks_probe("global module hooks", nn_module),
        _hooks_probe("global optimizer hooks", optim_module),
        *(_patch_probe(owner, name) for owner, name in PATCHABLE),
        Probe("sys.excepthook", _excepthook, lambda before: setattr(sys, "excepthook", before)),
        Probe("os.environ", _environment, _reset_environment),
        Probe("working directory", os.getcwd, os.chdir),
        Probe(
            "sys.argv",
            lambda: list(sys.argv),
            lambda before: sys.argv.__setitem__(slice(None), before),
        ),
        Probe("threads", _threads, lambda before: None),
        Probe("signal handlers", lambda: tuple(map(signal.getsignal, SIGNALS)), _reset_signals),
        Probe("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Probe(
            "deterministic mode",
            _deterministic,
            lambda b: torch.use_deterministic_algorithms(b[0], warn_only=b[1]),
        ),
        Probe("torch threads", torch.get_num_threads, torch.set_num_threads),
        Probe(
            "grad mode", torch.is_grad_enabled, lambda before: void(torch.set_grad_enabled(before))
        ),
        Probe(
            "anomaly mode",
            torch.is_anomaly_enabled,
            lambda b: void(torch.autograd.set_detect_anomaly(b)),
        ),
        Probe("autocast", _autocast, _reset_autocast),
        Probe(
            "torch modes",
            lambda: (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            _pop_modes,
        ),
        Probe("process group", _grouped, lambda before: torch.distributed.destroy_process_group()),
    )
}


def void(value: object) -> None:
    """For calls whose value is of no use."""


def look() -> dict[str, Any]:
    """The surroundings now."""
    return {name: probe.read() for name, probe in PROBES.items()}


def leaks_since(before: dict[str, Any]) -> list[str]:
    """Names of what changed, with the old and the new value; everything is put back."""
    found = []
    for generation in (1, 2):
        if look() != before:
            # a guard that is not closed goes with its model, once it is collected; a collection of
            # all there is takes half a second
            gc.collect(generation)
    for name, probe in PROBES.items():
        now = probe.read()
        if now != before[name] and (name != "threads" or (now := _lingering(before[name]))):
            found.append(f"{name}: {_difference(before[name], now)}")
            probe.undo(before[name])
    return found


def _lingering(before: frozenset[threading.Thread]) -> frozenset[threading.Thread]:
    """New threads that do not end by themselves."""
    for thread in _threads() - before:
        thread.join(GRACE)
    return _threads() - before


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        return ", ".join(
            sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
        )
    return f"{before!r} -> {now!r}"


def seed() -> tuple[Any, ...]:
    """The same randomness for every test; returns what to give to `unseed`."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    return before


def unseed(before: tuple[Any, ...]) -> None:
    """Back to the generators from before the test."""
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])

"""Random number generators that a training step may draw from: torch, numpy and Python."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class RngState(NamedTuple):
    """A moment of every generator; restoring it makes dropout and sampling repeat exactly."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any


_last_read: dict[str, tuple[bytes, Any]] = {"python": (b"", None), "numpy": (b"", None)}
"""Memory of a global generator when it was last read, and the state that was read.

To read a state takes longer than the rest of a step's capture, and most steps draw nothing from
either generator: its memory shows that without a read.
"""


# Bytes of a Mersenne twister: its key and its position
Memory = ctypes.c_char * (625 * 4)
_python: Any = random.getstate.__self__  # type: ignore[attr-defined]


def _python_memory() -> Any:
    """Where CPython keeps position and key; None where they are not found there."""
    if sys.implementation.name != "cpython":
        return None
    memory = Memory.from_address(id(_python) + object.__basicsize__)
    *key, position = random.getstate()[1]
    return memory if struct.unpack("625I", memory.raw) == (position, *key) else None


_python_twister = _python_memory()
_numpy_twister: tuple[Any, Any] = (None, None)
"""numpy's global generator, which a program may replace, and its memory; None of another kind."""


def _python_state() -> Any:
    if _python_twister is None:
        return random.getstate()
    memory = _python_twister.raw
    before, state = _last_read["python"]
    # a cached normal number can be drawn without touching this memory
    if memory != before or state[2] is not _python.gauss_next:
        state = random.getstate()
        _last_read["python"] = (memory, state)
    return state


def _numpy_state(numpy: Any) -> Any:
    global _numpy_twister
    generator = numpy.random.mtrand._rand._bit_generator
    if generator is not _numpy_twister[0]:
        found = None
        if type(generator) is numpy.random.MT19937:
            found = Memory.from_address(generator.ctypes.state_address)
        _numpy_twister = (generator, found)
    twister = _numpy_twister[1]
    if twister is None:
        return numpy.random.get_state()
    memory = twister.raw
    before, state = _last_read["numpy"]
    if memory != before or state[3]:
        state = numpy.random.get_state()
        _last_read["numpy"] = (memory, state)
    return state


def capture_rng() -> RngState:
    """Remember every generator; numpy's only if the program has imported it."""
    numpy = sys.modules.get("numpy")
    # Reading the states of an unused accelerator would initialise it.
    devices: tuple[torch.Tensor, ...] = ()
    if torch.accelerator.is_available():
        devices = _accelerator_states()
    return RngState(
        cpu=torch.default_generator.get_state(),
        devices=devices,
        python=_python_state(),
        numpy=None if numpy is None else _numpy_state(numpy),
    )


def restore_rng(state: RngState) -> None:
    """Put every generator back."""
    torch.set_rng_state(state.cpu)
    if state.devices:
        _accelerator().set_rng_state_all(list(state.devices))
    random.setstate(state.python)
    numpy = sys.modules.get("numpy")
    if state.numpy is not None and numpy is not None:
        numpy.random.set_state(state.numpy)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Put every generator back at the end, whatever happens."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


def _accelerator() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator)


def _accelerator_states() -> tuple[torch.Tensor, ...]:
    """Return the generators of the accelerator, if it was used."""
    module = _accelerator()
    if not hasattr(module, "get_rng_state_all") or not getattr(module, "is_initialized", bool)():
        return ()
    return tuple(module.get_rng_state_all())


def rng_to_facts(state: RngState, tensors: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    """Add the state to `tensors` and return the rest as plain facts."""
    version, numbers, gauss = state.python
    tensors[f"{name}/cpu"] = state.cpu
    tensors[f"{name}/python"] = torch.tensor(numbers, dtype=torch.int64)
    facts: dict[str, Any] = {"name": name, "python_version": version, "python_gauss": gauss}
    if state.numpy is not None:
        kind, keys, position, has_gauss, cached = state.numpy
        tensors[f"{name}/numpy"] = torch.tensor(keys.astype("int64"))
        facts["numpy"] = [kind, int(position), int(has_gauss), float(cached)]
    for i, device in enumerate(state.devices):
        tensors[f"{name}/device{i}"] = device.cpu()
    return facts


def rng_from_facts(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> RngState:
    """Invert `rng_to_facts`."""
    name = facts["name"]
    numbers = tuple(tensors[f"{name}/python"].tolist())
    python = (facts["python_version"], numbers, facts.get("python_gauss"))
    numpy = None
    if "numpy" in facts:
        kind, position, has_gauss, cached = facts["numpy"]
        keys = tensors[f"{name}/numpy"].numpy().astype("uint32")
        numpy = (kind, keys, position, has_gauss, cached)
    devices: list[torch.Tensor] = []
    while torch.accelerator.is_available() and f"{name}/device{len(devices)}" in tensors:
        devices.append(tensors[f"{name}/device{len(devices)}"])
    return RngState(cpu=tensors[f"{name}/cpu"], devices=tuple(devices), python=python, numpy=numpy)

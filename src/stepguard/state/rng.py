"""Random number generators that a training step may draw from: torch, numpy and Python."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RngState:
    """A moment of every generator; restoring it makes dropout and sampling repeat exactly."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any


TWISTER = 625 * 4
"""Bytes of a Mersenne twister: its key and its position."""
_last_read: dict[str, tuple[bytes, Any]] = {"python": (b"", None), "numpy": (b"", None)}
"""Memory of a global generator when it was last read, and the state that was read.

To read a state takes longer than the rest of a step's capture, and most steps draw nothing from
either generator: its memory shows that without a read.
"""


def _python_address() -> int:
    """Where CPython keeps position and key; 0 where they are not found there."""
    if sys.implementation.name != "cpython":
        return 0
    address = id(random.getstate.__self__) + object.__basicsize__  # type: ignore[attr-defined]
    *key, position = random.getstate()[1]
    found = struct.unpack("625I", ctypes.string_at(address, TWISTER))
    return address if found == (position, *key) else 0


_python_twister = _python_address()


def _python_state() -> Any:
    if not _python_twister:
        return random.getstate()
    memory = ctypes.string_at(_python_twister, TWISTER)
    before, state = _last_read["python"]
    # a cached normal number can be drawn without touching this memory
    if memory != before or state[2] is not random.getstate.__self__.gauss_next:  # type: ignore[attr-defined]
        state = random.getstate()
        _last_read["python"] = (memory, state)
    return state


def _numpy_state(numpy: Any) -> Any:
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator) is not numpy.random.MT19937:
        return numpy.random.get_state()
    memory = ctypes.string_at(generator.ctypes.state_address, TWISTER)
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
        cpu=torch.get_rng_state(),
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

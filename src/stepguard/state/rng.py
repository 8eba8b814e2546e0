"""All random number generators a training step may draw from: torch (every device), numpy, python."""

from __future__ import annotations

import random
import sys
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


def capture_rng() -> RngState:
    """Remember every generator. numpy only when the program has imported it."""
    numpy = sys.modules.get("numpy")
    return RngState(
        cpu=torch.get_rng_state(),
        devices=_accelerator_states(),
        python=random.getstate(),
        numpy=numpy.random.get_state() if numpy is not None else None,
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


def _accelerator() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    return torch.get_device_module(accelerator) if accelerator is not None else None


def _accelerator_states() -> tuple[torch.Tensor, ...]:
    """Generators of the accelerator, if there is one and it has been used (asking would initialise it)."""
    module = _accelerator() if torch.accelerator.is_available() else None
    if module is None or not hasattr(module, "get_rng_state_all") or not getattr(module, "is_initialized", bool)():
        return ()
    return tuple(module.get_rng_state_all())

"""Bytes of weights, gradients, optimizer state and checkpoints, before they exist."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.tensors.names import optimizer_parameters

SLOTS = {
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "adadelta": 2,
    "lion": 1,
    "muon": 1,
    "adagrad": 1,
}
"""Tensors of the parameter's size an optimizer keeps for each parameter, by its name."""


def model_bytes(model: nn.Module) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in chain(model.parameters(), model.buffers())
    )


def gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def optimizer_bytes(model: nn.Module, optimizer: Optimizer | None) -> tuple[int, str]:
    """What its state takes, or will take after the first step."""
    if optimizer is None:
        return 2 * gradient_bytes(model), "two moments assumed"
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, Tensor)
    )
    if held:
        return held, "as it is"
    name = type(optimizer).__name__.lower()
    slots = SLOTS.get(name, 0)
    if name in ("sgd", "rmsprop"):
        slots = int(bool(optimizer.param_groups[0].get("momentum"))) + (name == "rmsprop")
    params: list[Any] = [p for p in optimizer_parameters(optimizer) if p.requires_grad]
    return slots * sum(p.numel() * p.element_size() for p in params), f"{slots} slots a parameter"


def checkpoint_bytes(model: nn.Module, optimizer: Optimizer | None) -> tuple[int, str]:
    weights = model_bytes(model)
    state, how = optimizer_bytes(model, optimizer)
    return weights + state, f"weights {gigabytes(weights)}, optimizer {gigabytes(state)}, {how}"


def available_memory(device: torch.device) -> int | None:
    """Free bytes of an accelerator, or of the host for a CPU."""
    if device.type == "meta":  # not placed yet: it will go where there is an accelerator
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        return _host_memory()
    module = torch.get_device_module(device)
    free: int | None = module.mem_get_info(device)[0] if hasattr(module, "mem_get_info") else None
    return free


def _host_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def gigabytes(size: float) -> str:
    """`1.5 GB`, `3.2 MB`, `812 B`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if unit != "B" else f"{int(size)} B"
        size /= 1000
    raise AssertionError(size)

"""Bytes of weights, gradients and optimizer state, before they exist."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.state.host_memory import free_memory
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
    "rmsprop": 1,
}
"""Tensors of the parameter's size an optimizer keeps for each parameter, by its name."""


def model_bytes(model: nn.Module) -> int:
    return _bytes(model.parameters()) + _bytes(model.buffers())


def gradient_bytes(model: nn.Module) -> int:
    return _bytes(parameter for parameter in model.parameters() if parameter.requires_grad)


def optimizer_bytes(model: nn.Module, optimizer: Optimizer | None) -> tuple[int, str]:
    """What its state takes, or will take after the first step, and how that is known."""
    if optimizer is None:
        return 2 * gradient_bytes(model), "two moments assumed"
    held = 0
    for state in optimizer.state.values():
        if isinstance(state, dict):
            held += _bytes(value for value in state.values() if isinstance(value, Tensor))
    if held:
        return held, "as it is"
    slots = _slots(optimizer)
    trained = _bytes(p for p in optimizer_parameters(optimizer) if p.requires_grad)
    return slots * trained, f"{slots} slots a parameter"


def _slots(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__.lower()
    slots = SLOTS.get(name, 0)
    if name in ("sgd", "rmsprop") and optimizer.param_groups[0].get("momentum"):
        slots += 1
    return slots


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def available_memory(device: torch.device) -> int | None:
    """Free bytes of an accelerator, or of the host for a CPU; None if unknown."""
    if device.type == "meta":
        # Not placed yet: the model will go to the accelerator, if there is one.
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        return free_memory()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0])

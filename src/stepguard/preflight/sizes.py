"""Bytes of weights, gradients and optimizer state, before they exist."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.preflight.settings.keys import names
from stepguard.state.host_memory import free_memory
from stepguard.tensors.names import optimizer_parameters

ONE_SLOT = names("lion muon adagrad rmsprop")
TWO_SLOTS = names("adam adamw nadam radam adamax adadelta")
"""Optimizers that keep so many tensors of a parameter's size for each parameter."""


def model_bytes(model: nn.Module) -> int:
    return _bytes(model.parameters()) + _bytes(model.buffers())


def gradient_bytes(model: nn.Module) -> int:
    return _trained_bytes(model.parameters())


def optimizer_bytes(model: nn.Module, optimizer: Optimizer | None) -> tuple[int, str]:
    """What its state takes, or will take after the first step, and how that is known."""
    if optimizer is None:
        return 2 * gradient_bytes(model), "two moments assumed"
    held = 0
    for state in optimizer.state.values():
        if isinstance(state, dict):
            held += _bytes(filter(torch.is_tensor, state.values()))
    if held:
        return held, "as it is"
    slots = _slots(optimizer)
    trained = _trained_bytes(optimizer_parameters(optimizer))
    return slots * trained, f"{slots} slots a parameter"


def _slots(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__.lower()
    if name in TWO_SLOTS:
        return 2
    slots = int(name in ONE_SLOT)
    if name in ("sgd", "rmsprop") and optimizer.param_groups[0].get("momentum"):
        slots += 1
    return slots


def _trained_bytes(parameters: Iterable[Tensor]) -> int:
    return _bytes(parameter for parameter in parameters if parameter.requires_grad)


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

"""Everything a run leaves behind, and where two of them differ in a single bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.healthy.training import Training


def state_of(training: Training) -> dict[str, Any]:
    """Weights, gradients, buffers, optimizers, schedules, scalers, the loop's own things and every
    random generator.
    """
    held: dict[str, Any] = {}
    for name, learner in training.learners.items():
        model = learner.model
        held[name] = {
            "parameters": {key: p.detach() for key, p in model.named_parameters()},
            "gradients": {key: p.grad for key, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "training": [module.training for module in model.modules()],
            "optimizer": learner.optimizer.state_dict(),
            "further": [optimizer.state_dict() for optimizer in learner.further],
            "rates": [group["lr"] for group in learner.optimizer.param_groups],
            "scheduler": learner.scheduler.state_dict() if learner.scheduler is not None else None,
            "scaler": learner.scaler.state_dict() if learner.scaler is not None else None,
        }
    held["world"] = training.world()
    held["random"] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return frozen(held)


def frozen(value: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: frozen(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    return type(value).__name__  # functions of a schedule and the like have nothing to compare


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Names of what is not bit for bit the same."""
    if type(one) is not type(other):
        yield f"{where}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{where}: keys differ"
            return
        for key in one:
            yield from differences(one[key], other[key], f"{where}.{key}" if where else str(key))
    elif isinstance(one, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} entries"
            return
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif not _equal(one, other):
        yield where


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return _bits(one) == _bits(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return (tensor.shape, _bits(tensor.indices()), _bits(tensor.values()))
    raw = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)
    return (tensor.dtype, tensor.shape, bytes(raw.cpu().numpy().tobytes()))

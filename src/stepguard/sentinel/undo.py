"""A copy of parameters and optimizer state from just before an update, to take the update back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class UndoCopy:
    """Taken before `optimizer.step`; `restore` makes it as if the step had never been called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._params]
        self._state = {p: _copied(optimizer.state[p]) for p in self._params if p in optimizer.state}

    @torch.no_grad()
    def restore(self) -> None:
        """Same tensor objects where they existed before; state that the update created is removed."""
        for parameter, value in zip(self._params, self._values, strict=True):
            parameter.copy_(value)
            if parameter in self._state:
                _put_back(self._optimizer.state[parameter], self._state[parameter])
            else:
                self._optimizer.state.pop(parameter, None)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}


def _put_back(live: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in [k for k in live if k not in saved]:
        del live[key]
    for key, value in saved.items():
        target = live.get(key)
        if isinstance(target, Tensor) and isinstance(value, Tensor) and target.shape == value.shape:
            target.copy_(value)
        else:
            live[key] = value

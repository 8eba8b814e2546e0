"""Tell data from things that do something: what may be copied and put back, and what may not."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (dict, list, tuple, set, deque)
ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
UNCHANGING = frozenset({*ATOMS, bool})
MANY = 1024
"""Entries of a container up to which it is copied in every step; of a larger one only growth is
undone.
"""
SMALL = 65536
"""Elements of a tensor up to which a copy costs less than finding out whether it is needed."""
DEEPEST = 5


def is_array(value: object) -> bool:
    """True for a numpy array. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_data(value: object) -> bool:
    """True for numbers, tensors, arrays, containers and objects that are not callable."""
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor)) or is_array(value):
        return True
    if callable(value) or isinstance(value, nn.Module):
        return False
    return has_attributes(value)


def has_attributes(value: object) -> bool:
    """True for an object with an ordinary attribute dictionary."""
    return type(getattr(value, "__dict__", None)) is dict


def holds_only_data(value: Any, depth: int = 0) -> bool:
    """True for a helper object that is data all the way down, unlike a trainer or a logger."""
    if isinstance(value, (*ATOMS, Tensor)) or is_array(value):
        return True
    if depth > DEEPEST or isinstance(value, nn.Module | type) or callable(value):
        return False
    inside = _inside(value)
    if inside is None:
        return False
    return all(holds_only_data(item, depth + 1) for item in inside)


def _inside(value: Any) -> list[Any] | None:
    """Return what a small container or an object holds; None for anything else."""
    if isinstance(value, CONTAINERS):
        if len(value) > MANY:
            return None
        return list(value.values() if isinstance(value, dict) else value)
    if has_attributes(value) and not is_torchs(value):
        return list(vars(value).values())
    return None


def is_torchs(value: object) -> bool:
    """True for an object of a class that torch defines, and derives from no one else's.

    FSDP2 puts a class of its own in the place of the user's, derived from both.
    """
    kind = type(value)
    if not kind.__module__.startswith("torch."):
        return False
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package != "torch" and package not in sys.stdlib_module_names:
            return False
    return True


def has_graph(value: object) -> bool:
    """True for a tensor that an operation with gradients made."""
    return isinstance(value, Tensor) and value.grad_fn is not None


class WithoutGraph:
    """Stands for a tensor with a graph: holding the tensor would keep the graph in memory."""

    def __init__(self, value: Tensor) -> None:
        self._ref = weakref.ref(value)
        self._values = value.detach() if value.numel() <= SMALL else None

    def original(self, otherwise: Any) -> Any:
        """Return the tensor, its values if it is gone, or `otherwise` if those were not held."""
        alive = self._ref()
        if alive is not None:
            return alive
        if self._values is not None:
            return self._values
        return otherwise


def original(value: Any, otherwise: Any) -> Any:
    """Return the value that was held, also if `WithoutGraph` stands for it."""
    if isinstance(value, WithoutGraph):
        return value.original(otherwise)
    return value

"""Copy all that an update may touch: parameters, the whole optimizer, the optimizers inside it.

Whatever the update does with gradients that are missing or zero, `restore` makes it as if it had
never been called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stepguard.state.kept_values import KeptMapping, Scope
from stepguard.state.plain_data import ATOMS, CONTAINERS, has_attributes, is_array

WRITTEN_BY_OTHERS = frozenset({"_opt_called", "_zero_grad_profile_name"})
"""Attributes of an optimizer that schedulers and the profiler write."""


class UndoCopy:
    """Param_groups, state (whatever its keys are) and plain attributes before `optimizer.step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        own = vars(optimizer)
        self._unknown = sorted(key for key, value in own.items() if not _is_known(key, value))
        hooks = {key for key in own if key.endswith("_hooks")}
        skip = WRITTEN_BY_OTHERS | hooks | set(self._unknown)
        scope = Scope(everything=True)
        self._kept = KeptMapping(own, scope, attributes=True, skip=frozenset(skip))

    def restore(self) -> tuple[str, ...]:
        """Undo the update, in the same objects. Return the names of what cannot be compared."""
        if self._kept.moved(set()):
            self._kept.restore(set())
        own = vars(self._optimizer)
        kind = type(self._optimizer).__name__
        return tuple(f"{kind}.{key} ({type(own[key]).__name__})" for key in self._unknown)


def _is_known(key: str, value: Any) -> bool:
    """True for what can be compared and put back, and for what holds nothing."""
    if key.endswith("_hooks") or callable(value) or isinstance(value, Optimizer):
        return True
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor)) or is_array(value):
        return True
    return has_attributes(value)

"""A copy of all that an update may touch, from just before it: parameters, the whole optimizer, the
optimizers inside.

Whatever the update does with gradients that are missing or zero, `restore` makes it as if it had
never been called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stepguard.state.kept_values import ATOMS, CONTAINERS, KeptMapping, Reach, is_array

NOT_THE_UPDATES = frozenset({"_opt_called", "_zero_grad_profile_name"})
"""Attributes that others write on an optimizer."""


class UndoCopy:
    """Taken before `optimizer.step`: param_groups, state (whatever its keys are) and plain
    attributes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        own = vars(optimizer)
        self._unknown = sorted(key for key, value in own.items() if not _known(key, value))
        hooks = {key for key in own if key.endswith("_hooks")}
        skip = NOT_THE_UPDATES | hooks | set(self._unknown)
        self._kept = KeptMapping(
            own, Reach(everything=True), 0, attributes=True, skip=frozenset(skip)
        )

    def restore(self) -> tuple[str, ...]:
        """Same objects where they existed before, nothing that the update made. Names what cannot
        be known.
        """
        if self._kept.moved(set()):
            self._kept.restore(set())
        own = vars(self._optimizer)
        return tuple(
            f"{type(self._optimizer).__name__}.{k} ({type(own[k]).__name__})" for k in self._unknown
        )


def _known(key: str, value: Any) -> bool:
    """Can it be compared and put back, or does it not hold anything?"""
    if key.endswith("_hooks") or callable(value) or isinstance(value, Optimizer):
        return True
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor)) or is_array(value):
        return True
    return type(getattr(value, "__dict__", None)) is dict

"""See which dtype autocast computes in while the user's code is replayed.

Torch switches autocast off before an operation reaches a dispatch mode, so the tracer cannot ask
for it. A function mode sits above autocast and sees the state that the user's code has set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stepguard.tensors.dtypes import dtype_name


class AutocastObserver(TorchFunctionMode):
    """Remembers the first autocast dtype in force at a torch function; changes no call."""

    def __init__(self, device_types: Iterable[str]) -> None:
        super().__init__()
        self.dtype: str | None = None
        self._device_types = sorted(set(device_types))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.dtype is None:
            self.dtype = self._dtype_in_force()
        return func(*args, **(kwargs or {}))

    def _dtype_in_force(self) -> str | None:
        for device in self._device_types:
            if torch.is_autocast_enabled(device):
                return dtype_name(torch.get_autocast_dtype(device))
        return None

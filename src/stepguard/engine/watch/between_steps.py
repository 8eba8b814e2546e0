"""The moment between two steps: the last update is over, and nothing of the next forward pass has
run.

What the loop did since the update (pruned a mask, annealed a temperature, averaged weights) is its
own and stays, so buffers are remembered at the first call of the model, not at the end of the
update. A model whose root is never called itself (only its methods or its parts are) is found out
after one step; then a hook of torch that sees every module waits for the first call of a part, and
takes itself away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from stepguard.tensors.torch_private import graphs_compiled


class StepBoundary:
    """Calls `cross` once after every `open`."""

    def __init__(self, roots: Iterable[nn.Module], cross: Callable[[], None]) -> None:
        self._roots = tuple(roots)
        self._cross = cross
        self._open = True
        self._root_calls = True
        self._doubted = False
        self._parts: set[int] = set()
        self._handle: RemovableHandle | None = None

    @property
    def reliable(self) -> bool:
        """Does the root itself begin every step?"""
        return self._root_calls and not self._doubted

    def open(self) -> None:
        """An update is over."""
        if self._open:
            self._root_calls = False  # a whole step went by without a call
        self._open = True
        if not self.reliable and not graphs_compiled():
            self._parts = {id(module) for root in self._roots for module in root.modules()}
            self._handle = self._handle or register_module_forward_pre_hook(self._called)

    def root_called(self) -> None:
        """The model, or the framework that is about to call it."""
        if self._open:
            self._root_calls = True
            self._pass()

    def doubt(self) -> None:
        """A part of the model was seen to run before its root."""
        self._doubted = True

    def close(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, module: nn.Module, args: Any) -> None:
        if self._open and id(module) in self._parts and torch.is_grad_enabled():
            self._pass()

    def _pass(self) -> None:
        self._open = False
        self.close()
        self._cross()

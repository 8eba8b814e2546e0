"""Find the module of an operation: by the call stack, or in the backward by node numbers.

Autograd numbers its nodes in the order of their creation, and a backward node keeps the number of
the forward operation that created it. So the numbers between entry and exit of a module's forward
say which backward nodes belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as registry

from stepguard.tensors.names import named_modules, names_by_id
from stepguard.tensors.torch_private import next_sequence_number


class Span(NamedTuple):
    """Autograd nodes numbered `first` up to (not with) `end` were created inside this module."""

    first: int
    end: int
    name: str


class ModuleSpans:
    """Follow the named modules through forward calls; a context manager that owns its two hooks."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.names = names_by_id(named_modules(roots))
        self.extra = tuple(prefix for prefix in roots if prefix)
        self._stack: list[tuple[str, int]] = []
        self._spans: list[Span] = []
        self._hooks = ExitStack()
        self.observer: Any = None
        """Its `enter_module(args)` and `leave_module(module, args, output)` are called, if any."""

    def __enter__(self) -> ModuleSpans:
        enter = registry.register_module_forward_pre_hook(self._begin)
        # A checkpointed block ends its recomputation by an exception once it has what it needs:
        # without always_call the module would stay on the stack.
        leave = registry.register_module_forward_hook(self._end, always_call=True)
        self._hooks.callback(enter.remove)
        self._hooks.callback(leave.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.close()

    @property
    def current(self) -> str | None:
        """Innermost module whose forward is running; None outside every module."""
        if not self._stack:
            return None
        return self._stack[-1][0]

    @property
    def depth(self) -> int:
        """How many modules are running, one inside the other."""
        return len(self._stack)

    def created(self, sequence: int) -> str | None:
        """Return the innermost module in which the autograd node of this number was created."""
        within = [span for span in self._spans if span.first <= sequence < span.end]
        if not within:
            return None
        return min(within, key=lambda span: span.end - span.first).name

    def forget_before(self, sequence: int) -> None:
        """Drop the spans that end before the autograd node of this number."""
        self._spans = [span for span in self._spans if span.end > sequence]

    def belongs_to_model(self, name: str | None) -> bool:
        """False outside every module and in an extra module such as a criterion."""
        return name is not None and name.partition(".")[0] not in self.extra

    def _begin(self, module: nn.Module, args: Any) -> None:
        if id(module) in self.names:
            if self.observer is not None:
                self.observer.enter_module(args)
            self._stack.append((self.names[id(module)], next_sequence_number()))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self.names and self._stack:
            if self.observer is not None:
                self.observer.leave_module(module, args, output)
            name, first = self._stack.pop()
            self._spans.append(Span(first, next_sequence_number(), name))

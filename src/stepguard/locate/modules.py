"""Which module an operation belongs to: by the call stack in the forward pass, by sequence numbers
in the backward.
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
    """Follows the named modules through forward calls; a context manager that owns its two hooks."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.names = names_by_id(named_modules(roots))
        self.extra = tuple(prefix for prefix in roots if prefix)
        self._stack: list[tuple[str, int]] = []
        self._spans: list[Span] = []
        self._hooks = ExitStack()

    def __enter__(self) -> ModuleSpans:
        enter = registry.register_module_forward_pre_hook(self._begin)
        # Checkpointed blocks abort their recomputation with an exception: without always_call the
        # stack would leak.
        leave = registry.register_module_forward_hook(self._end, always_call=True)
        self._hooks.callback(enter.remove)
        self._hooks.callback(leave.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.close()

    @property
    def current(self) -> str | None:
        """Innermost module whose forward is running; None outside every module."""
        return self._stack[-1][0] if self._stack else None

    def created(self, sequence: int) -> str | None:
        """The innermost module in which the autograd node of this number was created."""
        within = [span for span in self._spans if span.first <= sequence < span.end]
        return min(within, key=lambda span: span.end - span.first).name if within else None

    def forget_before(self, sequence: int) -> None:
        """Drop what was created before the autograd node of this number."""
        self._spans = [span for span in self._spans if span.end > sequence]

    def belongs_to_model(self, name: str | None) -> bool:
        """False outside every module and in an extra module such as a criterion."""
        return name is not None and name.partition(".")[0] not in self.extra

    def _begin(self, module: nn.Module, args: Any) -> None:
        if id(module) in self.names:
            self._stack.append((self.names[id(module)], next_sequence_number()))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self.names and self._stack:
            name, first = self._stack.pop()
            self._spans.append(Span(first, next_sequence_number(), name))

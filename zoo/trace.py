"""An observer of plain training loops that is independent of stepguard: every operation with a
non-finite result.

It knows the phase, the module whose forward runs (or created the autograd node), and the node. It
judges nothing; `prove` compares what it saw with what a case claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IGNORED = frozenset(
    "aten." + name
    for name in ("empty", "new_empty", "empty_like", "empty_strided", "detach", "isnan", "isinf")
)


@dataclass(frozen=True, slots=True)
class Event:
    """One operation that gave a non-finite value."""

    step: int
    micro: int
    phase: str
    module: str | None
    op: str
    node: str | None
    nan_in: bool
    inf_in: bool
    nan_out: bool
    inf_out: bool


class Observer(TorchDispatchMode):
    """Set `step`, `micro` and `phase` from the loop; read `events` afterwards."""

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        super().__init__()
        self.names = {
            id(module): f"{prefix}.{name}".strip(".")
            for prefix, root in roots.items()
            for name, module in root.named_modules()
        }
        self.events: list[Event] = []
        self.step, self.micro, self.phase = 0, 0, "loss"
        self._stack: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        enter = registry.register_module_forward_pre_hook(self._enter)
        leave = registry.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def begin(self, step: int) -> None:
        self.step = step
        self._stack.clear()
        self._spans.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self.names:
            self._stack.append((self.names[id(module)], torch._C._autograd._get_sequence_nr()))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if id(module) in self.names and self._stack:
            name, first = self._stack.pop()
            self._spans.append((first, torch._C._autograd._get_sequence_nr(), name))

    def _where(self) -> tuple[str | None, str | None]:
        if self._stack:
            return self._stack[-1][0], None
        node = torch._C._current_autograd_node() if self.phase != "optimizer" else None
        if node is None:
            return None, None
        number = node._sequence_nr()
        inside = [(end - first, name) for first, end, name in self._spans if first <= number < end]
        return (min(inside)[1] if inside else None), node.name()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = str(func._overloadpacket)
        if op in IGNORED:
            return func(*args, **kwargs)
        nan_in, inf_in = flaws((args, kwargs))
        out = func(*args, **kwargs)
        written = [
            a
            for a, s in zip(args, func._schema.arguments, strict=False)
            if s.alias_info and s.alias_info.is_write
        ]
        nan_out, inf_out = flaws((out, written))
        if nan_out or inf_out:
            module, node = self._where()
            phase = self.phase
            if phase == "loss" and node is not None:
                phase = "backward"  # a gradient that the loss itself asks for
            elif phase == "loss" and module is not None and module.partition(".")[0] != "criterion":
                phase = "forward"
            self.events.append(
                Event(
                    self.step, self.micro, phase, module, op, node, nan_in, inf_in, nan_out, inf_out
                )
            )
        return out


def flaws(tree: Any) -> tuple[bool, bool]:
    """Whether NaN and whether Inf is anywhere in the tensors and numbers of the tree."""
    nan = inf = False
    for leaf in tree_leaves(tree):
        if isinstance(leaf, float):
            nan, inf = nan or math.isnan(leaf), inf or math.isinf(leaf)
        elif isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            values = dense(leaf)
            nan, inf = (
                nan or bool(torch.isnan(values).any()),
                inf or bool(torch.isinf(values).any()),
            )
    return nan, inf


def dense(tensor: Tensor) -> Tensor:
    """Stored values as real numbers."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def finite(tensors: Any) -> bool:
    return not any(any(flaws(t)) for t in tensors if t is not None)

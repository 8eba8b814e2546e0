"""What a watched loop does with its gradients between two updates: kept, dropped, mixed.

Judged from identities and versions of gradients that are taken anyway: a few comparisons a step.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

WINDOW = 16
"""Updates that are remembered."""
MOST_NODES = 5000


@dataclass(slots=True)
class GradientHabits:
    """Kept over the run. Nothing here reads a value, but for one gradient, once."""

    other_steps: int = 0
    """Updates of other optimizers in this process."""
    calls: int = 0
    """Calls of the model."""
    _updates: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _found: set[str] = field(default_factory=set)
    """What the step at hand did: `carried`, `discarded`, `foreign`."""
    _used: tuple[weakref.ref[Tensor], int] | None = None
    """A gradient of the last update, and how often it had been written then."""
    _at_backward: tuple[int, int, int] = (0, 0, 0)
    """Other updates, calls of the model and writes to a weight when the last own backward ended."""
    _harmless: bool = False
    """Gradients are dropped on purpose, or what is carried over is 0."""
    _searched: bool = False
    _read: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """How many of the last updates did each of these."""
        found: dict[str, int] = {}
        for update in self._updates:
            for name in update:
                found[name] = found.get(name, 0) + 1
        return found

    def backward_begins(
        self, root: Tensor, parameters: list[Tensor], *, first: bool, dropped: bool
    ) -> None:
        """`first`: of this update; `dropped`: the gradients of the last one are gone."""
        self._search_inputs(root, parameters)
        if first:
            self._found.discard("carried")
            if self._is_carried(parameters):
                self._found.add("carried")
            return
        others, calls, writes = self._at_backward
        if not dropped:
            if self.other_steps > others:
                self._found.add("foreign")
            return
        self._found -= {"carried", "foreign"}
        same_weights = bool(parameters) and parameters[0]._version == writes
        # another player's loss may reach these gradients, and is dropped on purpose
        if not self.other_steps and self.calls > calls and same_weights and not self._harmless:
            self._found.add("discarded")

    def _is_carried(self, parameters: list[Tensor]) -> bool:
        if self._used is None or self._harmless:
            return False
        gradient, writes = self._used[0](), self._used[1]
        if gradient is None or gradient._version != writes:
            return False
        if not any(parameter.grad is gradient for parameter in parameters):
            return False
        if not self._read:
            self._read = True
            self._harmless = not bool((gradient != 0).any())  # the optimizer zeroes them itself
        return not self._harmless

    def backward_over(self, parameters: list[Tensor]) -> None:
        """A backward pass has left gradients in these parameters."""
        writes = parameters[0]._version if parameters else 0
        self._at_backward = (self.other_steps, self.calls, writes)

    def _search_inputs(self, root: Tensor, parameters: list[Tensor]) -> None:
        """Once, where gradients are dropped: are those of inputs wanted, as by an attack?"""
        if self._searched or not self._updates or "discarded" not in self._updates[-1]:
            return
        self._searched = True
        known = {id(parameter) for parameter in parameters}
        waiting: list[Any] = [root.grad_fn]
        seen: set[Any] = set()
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and id(variable) not in known:
                self._harmless = True
            waiting += [behind for behind, _ in node.next_functions]

    def update_made(self, parameters: list[Tensor], marks: list[tuple[int, int]]) -> None:
        """An optimizer step is over. `marks`: identity and version of each gradient, after the last
        backward pass.
        """
        gradient = next((p.grad for p in parameters if p.grad is not None), None)
        if gradient is None and any(identity for identity, _ in marks):
            self._found = {"thrown"}
        elif "discarded" in self._found:
            now = [0 if p.grad is None else id(p.grad) for p in parameters]
            if now != [identity for identity, _ in marks]:
                self._harmless = True  # the loop has put gradients of its own there
                self._found.discard("discarded")
        self._updates.append(frozenset(self._found))
        self._found = set()
        self._used = None if gradient is None else (weakref.ref(gradient), gradient._version)

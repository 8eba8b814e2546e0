"""Attributes of the user's own modules: counters, running tensors, lists, hidden states.

A vetoed step puts them back. References to what was there are held, small containers and tensors
are copied, and a large tensor is copied again only when its version counter moved. torch's own
modules keep their state in buffers and are skipped.

Not covered: state outside the modules (variables of the loop, of closures), numpy arrays of more
than 65536 elements, entries changed inside a container of more than 1024, tensors beyond 2**24
elements together (or one of more than 2**22 that is replaced in every step), and objects that hold
more than data.
"""

from __future__ import annotations

from itertools import compress
from operator import is_, is_not
from typing import Any

from torch import Tensor, nn

from stepguard.state.kept_values import KeptValue, Scope, keep
from stepguard.state.plain_data import SMALL, WithoutGraph, has_graph, is_data, is_torchs, original

LARGEST_HELD = 2**22
"""Elements of a tensor that is held until the next step, though the model has dropped it."""
INTERNAL = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: parameters, buffers, submodules, hooks, the training flag.
"""


class AttributeKeeper:
    """Remembers the attributes of some modules at one moment and can go back to it.

    All attributes of all modules are one flat list, so that a step in which none moved is a few
    passes in C.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._owns: list[dict[str, Any]] = []
        self._count = -1
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._inside: dict[int, KeptValue] = {}
        """By position in `_values`: the memory of a value that can change in place."""
        self._scope = Scope()

    def remember(self, modules: list[nn.Module]) -> None:
        """Take the present values of these modules, and of no others."""
        now = None
        if len(modules) == len(self._modules) and all(map(is_, modules, self._modules)):
            now = self._now()
        if now is None:
            self._start_over(modules)
            return
        for index in compress(range(len(now)), map(is_not, now, self._values)):
            self._take(index, now[index], replaced=True)
        seen: set[int] = set()
        for kept in self._inside.values():
            kept.refresh(seen)

    def moved(self) -> bool:
        """Has any of them changed since?"""
        now = self._now()
        if now is None or not all(map(_is_unchanged, self._values, now)):
            return True
        seen: set[int] = set()
        return any(kept.moved(seen) for kept in self._inside.values())

    def restore(self) -> None:
        """Go back to what `remember` took. What is not data (a function, a module) stays."""
        seen: set[int] = set()
        for kept in self._inside.values():
            kept.restore(seen)
        for (own, key), value in zip(self._places, self._values, strict=True):
            present = own.get(key)
            before = original(value, present)
            if before is not present and is_data(before) and not callable(present):
                own[key] = before
        if self._attributes() != self._count:
            self._remove_added()

    def _attributes(self) -> int:
        return sum(map(len, self._owns))

    def _now(self) -> list[Any] | None:
        """Return the present values in the same order; None if attributes have come or gone."""
        if self._attributes() != self._count:
            return None
        try:
            return [own[key] for own, key in self._places]
        except KeyError:
            return None

    def _start_over(self, modules: list[nn.Module]) -> None:
        self._modules = list(modules)
        self._scope = Scope()
        self._inside = {}
        # A layer of torch keeps all it remembers in parameters and buffers.
        self._owns = [vars(module) for module in modules if not is_torchs(module)]
        self._count = self._attributes()
        self._places = [(own, key) for own in self._owns for key in own if key not in INTERNAL]
        self._values = [None] * len(self._places)
        for index, (own, key) in enumerate(self._places):
            self._take(index, own[key])

    def _take(self, index: int, value: Any, *, replaced: bool = False) -> None:
        """`replaced`: the attribute gets a new object in every step. A large tensor is then held,
        not copied.
        """
        large = replaced and isinstance(value, Tensor) and value.numel() > SMALL
        too_large = large and value.numel() > LARGEST_HELD
        self._values[index] = value
        if has_graph(value) or too_large:
            self._values[index] = WithoutGraph(value)
        kept = None if large else keep(value, self._scope)
        if kept is None:
            self._inside.pop(index, None)
        else:
            self._inside[index] = kept

    def _remove_added(self) -> None:
        known = {(id(own), key) for own, key in self._places}
        for own in self._owns:
            for key in list(own):
                added = key not in INTERNAL and (id(own), key) not in known
                if added and is_data(own[key]):
                    del own[key]


def _is_unchanged(before: Any, now: Any) -> bool:
    """A number that was written again with the same value has not changed."""
    if before is now or original(before, None) is now:
        return True
    if type(before) not in (int, float, bool) or type(now) is not type(before):
        return False
    return bool(before == now)

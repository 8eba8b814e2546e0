"""Attributes of the user's own modules: counters, running tensors, lists, hidden states. A vetoed
step puts them back.

References to what was there are held, small containers and tensors are copied, and a large tensor
is copied again only when its version counter moved. torch's own modules keep their state in buffers
and need no look.

Not covered: state outside the modules (variables of the loop, of closures), numpy arrays of more
than 65536 elements, entries changed inside a container of more than 1024, tensors beyond 2**24
elements together (or one of more than 2**22 that is bound anew), and objects that hold more than
data.
"""

from __future__ import annotations

from itertools import compress
from operator import is_, is_not
from typing import Any

from torch import Tensor, nn

from stepguard.state.kept_values import SMALL, Kept, Reach, Shadow, has_history, keep, plain, real

LARGEST_HELD = 2**22
"""Elements of a tensor that is held until the next step, though the model has let go of it."""
INTERNAL = frozenset(vars(nn.Module()))
"""What torch itself keeps in a module: parameters, buffers, submodules, hooks, the training flag.
"""


class AttributeKeeper:
    """Remembers the attributes of some modules at one moment and can go back to it.

    All attributes of all modules are one flat list, so that a step on which none moved is a few
    passes in C.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._owns: list[dict[str, Any]] = []
        self._count = -1
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._inside: dict[int, Kept] = {}
        """By place: the memory of a value that can change in place."""
        self._reach = Reach()

    def remember(self, modules: list[nn.Module]) -> None:
        """Take the present values of these modules, and of no others."""
        known = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        now = self._now() if known else None
        if now is None:
            self._look_anew(modules)
            return
        for index in compress(range(len(now)), map(is_not, now, self._values)):
            self._take(index, now[index], again=True)
        seen: set[int] = set()
        for kept in self._inside.values():
            kept.refresh(seen)

    def moved(self) -> bool:
        """Has any of them changed since?"""
        now, seen = self._now(), set[int]()
        if now is None or not all(map(_still, self._values, now)):
            return True
        return any(kept.moved(seen) for kept in self._inside.values())

    def restore(self) -> None:
        """Back to what `remember` took. What is no data (a function, a module) stays as it is."""
        seen: set[int] = set()
        for kept in self._inside.values():
            kept.restore(seen)
        for (own, key), value in zip(self._places, self._values, strict=True):
            present = own.get(key)
            before = real(value, present)
            if before is not present and plain(before) and not callable(present):
                own[key] = before
        if sum(map(len, self._owns)) != self._count:
            self._remove_new()

    def _now(self) -> list[Any] | None:
        """The present values in the same order; None where attributes have come or gone."""
        if sum(map(len, self._owns)) != self._count:
            return None
        try:
            return [own[key] for own, key in self._places]
        except KeyError:
            return None

    def _look_anew(self, modules: list[nn.Module]) -> None:
        self._modules, self._reach, self._inside = list(modules), Reach(), {}
        self._owns = [vars(module) for module in modules if not is_torch_module(module)]
        self._count = sum(map(len, self._owns))
        self._places = [(own, key) for own in self._owns for key in own if key not in INTERNAL]
        self._values = [None] * len(self._places)
        for index, (own, key) in enumerate(self._places):
            self._take(index, own[key])

    def _take(self, index: int, value: Any, *, again: bool = False) -> None:
        """`again`: the attribute is bound anew from step to step. A large tensor is then held, not
        copied.
        """
        large = again and isinstance(value, Tensor) and value.numel() > SMALL
        held = not has_history(value) and not (large and value.numel() > LARGEST_HELD)
        self._values[index] = value if held else Shadow(value)
        kept = None if large else keep(value, self._reach)
        if kept is not None:
            self._inside[index] = kept
        else:
            self._inside.pop(index, None)

    def _remove_new(self) -> None:
        known = {(id(own), key) for own, key in self._places}
        for own in self._owns:
            for key in [
                key
                for key in own
                if key not in INTERNAL and (id(own), key) not in known and plain(own[key])
            ]:
                del own[key]


def _still(before: Any, now: Any) -> bool:
    """A number that was written again with the same value has not moved."""
    if before is now or real(before, None) is now:
        return True
    return type(before) in (int, float, bool) and type(now) is type(before) and bool(before == now)


def is_torch_module(module: nn.Module) -> bool:
    """A layer of torch keeps all it remembers in parameters and buffers."""
    return type(module).__module__.startswith("torch.")

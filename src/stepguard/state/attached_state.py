"""State that steps move and that no module and no optimizer holds: communication hooks, averagers.

DDP calls a hook with every bucket of gradients. Hooks that compress remember what they left out, so
a NaN that is vetoed in the weights would come back out of their memory in every later step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard.state.plain_data import ATOMS, DEEPEST

Objects = Callable[[], Mapping[str, object]]


class AttachedState:
    """The memory of some objects before a step, and how it is put back after a veto."""

    def __init__(self, objects: Objects) -> None:
        """`objects`: those that there are now, by name; hooks may be registered at any time."""
        self._objects = objects
        self._places: dict[tuple[int, Any], _Place] = {}
        self._holders: list[_Holder] = []

    def __bool__(self) -> bool:
        return bool(self._objects())

    def remember(self) -> None:
        """Take the present values: tensors that are replaced in every step are only held."""
        places: dict[tuple[int, Any], _Place] = {}
        self._holders = []
        for item in self._objects().values():
            for holder in _holders(item):
                self._holders.append(holder)
                for key, value in holder.kept().items():
                    place = self._places.get((id(holder.item), key)) or _Place()
                    place.take(value)
                    places[id(holder.item), key] = place
        self._places = places

    def restore(self) -> list[str]:
        """Go back to what `remember` took; return the names of what had to be set to 0 instead."""
        reset: list[str] = []
        for holder in self._holders:
            before: dict[Any, Any] = {}
            for (owner, key), place in self._places.items():
                if owner == id(holder.item):
                    before[key] = place.value
                    if not place.put_back():
                        reset.append(f"{type(holder.item).__name__} {key}")
            holder.replace(before)
        return reset

    # --- in snapshots and checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything kept, by object; tensors are the live ones."""
        return {name: _as_tree(item) for name, item in self._objects().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back into the objects of the same names."""
        for name, item in self._objects().items():
            if name in state:
                _fill(item, state[name])


class _Place:
    """One value of one object."""

    def __init__(self) -> None:
        self.value: Any = None
        self._version = 0
        self._copy: Any = None

    def take(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._take_tensor(value)
        elif _is_generator(value):
            self._copy = value.get_state()
        self.value = value

    def _take_tensor(self, value: Tensor) -> None:
        unmoved = isinstance(self.value, Tensor) and self.value._version == self._version
        if value is not self.value:
            # a tensor in the place of one that was never written to: written to neither
            self._copy = None if unmoved else value.detach().clone()
        elif not unmoved:
            self._copy = value.detach().clone()
        self._version = value._version

    @torch.no_grad()
    def put_back(self) -> bool:
        """False where the value is lost: it was held, and has been written to."""
        value = self.value
        if _is_generator(value):
            value.set_state(self._copy)
        if not isinstance(value, Tensor) or value._version == self._version:
            return True
        lost = self._copy is None
        if lost:
            value.zero_()
        else:
            value.copy_(self._copy)
        self._version = value._version
        return not lost


class _Holder:
    """An object, dict or list as a set of named values."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def kept(self) -> dict[Any, Any]:
        found = _entries(self.item)
        return {key: value for key, value in found.items() if _is_kept(value)}

    def replace(self, before: Mapping[Any, Any]) -> None:
        """Give it back the values it had; what is not kept stays."""
        if isinstance(self.item, list):
            self.item[:] = before.values()
            return
        for key, value in self.kept().items():
            if key not in before:
                _remove(self.item, key)
            elif before[key] is not value:
                _put(self.item, key, before[key])
        for key in before.keys() - _entries(self.item).keys():
            _put(self.item, key, before[key])


def _holders(item: object, depth: int = 0) -> Iterator[_Holder]:
    """The object and the containers inside it."""
    holder = _Holder(item)
    yield holder
    if depth < DEEPEST:
        for value in holder.kept().values():
            if isinstance(value, dict | list):
                yield from _holders(value, depth + 1)


def _entries(item: Any) -> dict[Any, Any]:
    if isinstance(item, dict):
        return item
    if isinstance(item, list):
        return dict(enumerate(item))
    # PowerSGD's state has slots instead of a dictionary
    names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(item, name) for name in names if hasattr(item, name)}
    return {**found, **getattr(item, "__dict__", {})}


def _is_kept(value: object) -> bool:
    return isinstance(value, (*ATOMS, Tensor, dict, list, tuple)) or _is_generator(value)


def _is_generator(value: object) -> bool:
    """True for torch's and numpy's generators of random numbers."""
    return callable(getattr(value, "get_state", None)) and hasattr(value, "set_state")


def _put(item: Any, key: Any, value: Any) -> None:
    if isinstance(item, dict | list):
        item[key] = value
    else:
        setattr(item, key, value)


def _remove(item: Any, key: Any) -> None:
    if isinstance(item, dict):
        del item[key]
    elif not isinstance(item, list):
        delattr(item, key)


def _as_tree(item: Any) -> Any:
    """Plain values and tensors only; a generator by its state."""
    if isinstance(item, list):
        return [_as_tree(value) for value in item]
    if _is_generator(item):
        return _generator_state(item)
    if isinstance(item, (*ATOMS, Tensor, tuple)):
        return item
    return {key: _as_tree(value) for key, value in _Holder(item).kept().items()}


def _generator_state(generator: Any) -> Any:
    state = generator.get_state()
    if isinstance(state, Tensor):
        return state
    # numpy's: a tuple with one array
    return [part.tolist() if hasattr(part, "tolist") else part for part in state]


@torch.no_grad()
def _fill(item: Any, tree: Any) -> None:
    """Write a tree into an object, into the same tensors where they fit."""
    live = _Holder(item).kept()
    if isinstance(item, dict):
        for key in live.keys() - tree.keys():
            del item[key]
    entries = enumerate(tree) if isinstance(tree, list) else tree.items()
    for key, value in entries:
        present: Any = live.get(key)
        if _is_generator(present):
            present.set_state(tuple(value) if isinstance(value, list) else value)
        elif isinstance(present, dict | list):
            _fill(present, value)
        elif isinstance(value, Tensor):
            _fill_tensor(item, key, present, value)
        else:
            _put(item, key, value)


def _fill_tensor(item: Any, key: Any, present: Any, value: Tensor) -> None:
    if isinstance(present, Tensor) and present.shape == value.shape:
        present.copy_(value)
    else:
        _put(item, key, value.detach().clone())


def communication_hooks(model: nn.Module) -> dict[str, object]:
    """States of the hooks that DDP calls with its gradients, by place and class."""
    found: dict[str, object] = {}
    if not isinstance(model, DistributedDataParallel):
        return found
    for number, (_, state) in enumerate(model._comm_hooks):
        if _is_memory(state):
            found[f"{number}:{type(state).__name__}"] = state
    return found


def _is_memory(state: object) -> bool:
    """True for an object of values and process groups; torchft's manager holds threads, say."""
    if isinstance(state, (*ATOMS, dist.ProcessGroup)):
        return False
    return all(_is_kept(v) or isinstance(v, dist.ProcessGroup) for v in _entries(state).values())


def averager(optimizer: Optimizer) -> dict[str, object]:
    """What a wrapper around an optimizer averages weights with; it counts the steps."""
    found = getattr(optimizer, "averager", None)
    return {} if found is None else {"averager": found}

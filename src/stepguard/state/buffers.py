"""Remember buffers (and attributes of modules) before a step, and put them back after a veto.

The forward pass changes them, so a vetoed step must put them back. Norm layers change theirs
without raising the tensor's version counter, so they are copied in every step, as are small
buffers. Large ones (position tables, masks) are copied once and again only when their version
counter moved.

Not covered: a large buffer that is written through `.data` (the counter does not see it) keeps what
the step left, and a buffer registered under a new name during the step stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard.state.files import ATOMS, CONTAINERS, DEEPEST, SMALL, has_attributes, is_array
from stepguard.state.python_state import AttributeKeeper, KeptMapping, Scope
from stepguard.tensors.torch_private import foreach_copy_
from stepguard.tensors.values import (
    dtype_and_shape,
    is_expanded,
    is_lazy,
    local_part,
    versions,
    written_since,
)

# --- Remember buffers (and attributes of modules) before a step, and put them back after a veto.


@dataclass(slots=True)
class _Place:
    """Where a buffer is registered. It may be None, and one tensor may have several places."""

    owner: nn.Module
    key: str
    buffer: Tensor | None


@dataclass(slots=True)
class _Copy:
    live: Tensor
    saved: Tensor
    version: int
    always: bool
    """Copied whatever its version counter says."""
    silent: bool
    """A norm layer's statistics: they change without raising the version counter."""

    @property
    def moved(self) -> bool:
        return self.live._version != self.version


class BufferKeeper:
    """Remembers every buffer of some modules at one moment and can go back to it.

    `small`: elements up to which a buffer is copied whatever its version counter says.
    """

    def __init__(self, modules: Iterable[nn.Module], *, small: int = SMALL) -> None:
        self._roots = tuple(modules)
        self._small = small
        self._places: list[_Place] = []
        self._statistics: list[_Place] = []
        self._copies: list[_Copy] = []
        self._count = -1
        self._marked: list[Tensor] = []
        self._marks: list[int] = []
        self._attributes = AttributeKeeper()

    def remember(self) -> None:
        """Take the present values, by in-place copies into memory that is allocated once."""
        modules = self._modules()
        self._attributes.remember(modules)
        if self._registered_otherwise(modules):
            self._start_over(modules)
            return
        stale = [c for c in self._copies if c.always or c.moved]
        if not stale:
            return
        foreach_copy_([c.saved for c in stale], [c.live.detach() for c in stale])
        for copy in stale:
            copy.version = copy.live._version

    def _start_over(self, modules: list[nn.Module]) -> None:
        self._places = []
        for module in modules:
            for key, buffer in module._buffers.items():
                self._places.append(_Place(module, key, buffer))
        self._statistics = [place for place in self._places if keeps_statistics(place.owner)]
        self._copies = _copies(self._places, self._small)
        self._count = len(self._places)

    def statistics(self) -> list[Tensor]:
        """Return the running statistics of norm layers as they are, without walking the model."""
        live = [place.owner._buffers.get(place.key) for place in self._statistics]
        return [buffer for buffer in live if buffer is not None and buffer.is_floating_point()]

    def mark(self) -> None:
        """Start observing for `norms_ran`."""
        self._marked = [
            place.buffer
            for place in self._statistics
            if place.buffer is not None and _is_batch_counter(place.buffer)
        ]
        self._marks = versions(self._marked)

    def norms_ran(self) -> bool:
        """Has a norm layer run since `mark`? Its batch counter is written in place."""
        return bool(written_since(self._marked, self._marks))

    def restore(self) -> None:
        """Go back to what `remember` took, the same tensor objects included."""
        self._attributes.restore()
        for place in self._places:
            place.owner._buffers[place.key] = place.buffer
        with torch.no_grad():
            for copy in self._copies:
                if copy.always or copy.moved:
                    copy.live.copy_(copy.saved)
                    copy.version = copy.live._version

    def written(self) -> list[Tensor]:
        """Return the floating-point buffers written or replaced since `remember`.

        Those of norm layers are left out: `statistics` gives them, and their counters do not show
        it. Does not walk the model.
        """
        changed = [copy.live for copy in self._copies if copy.moved and not copy.silent]
        changed += [buffer for _, buffer in self._replaced()]
        return [buffer for buffer in changed if buffer.is_floating_point()]

    def written_at(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Return what `written` does, with the place of each: its module's id and its name."""
        moved = {id(copy.live) for copy in self._copies if copy.moved and not copy.silent}
        changed = self._replaced()
        if moved:
            for place in self._places:
                if place.buffer is not None and id(place.buffer) in moved:
                    changed.append((place, place.buffer))
        return [
            ((id(place.owner), place.key), buffer)
            for place, buffer in changed
            if buffer.is_floating_point()
        ]

    def _replaced(self) -> list[tuple[_Place, Tensor]]:
        """Buffers that are another tensor than the one that was remembered."""
        found: list[tuple[_Place, Tensor]] = []
        for place in self._places:
            present = place.owner._buffers.get(place.key)
            if present is not None and present is not place.buffer:
                found.append((place, present))
        return found

    def changing(self) -> bool:
        """Has a forward pass changed anything since `remember`? Norm layers are presumed to."""
        if any(c.silent or c.moved for c in self._copies):
            return True
        return self._registered_otherwise(self._modules()) or self._attributes.moved()

    def as_remembered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors by name, with what `remember` took in place of every live buffer."""
        # By address: detached references share their memory with the buffer, not its identity.
        taken = {copy.live.data_ptr(): copy.saved for copy in self._copies if copy.live.numel()}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            saved = taken.get(tensor.data_ptr()) if tensor.numel() else None
            if saved is not None and saved.shape == tensor.shape:
                found[name] = saved
            else:
                found[name] = tensor
        return found

    def remembered(self, buffer: Tensor) -> Tensor:
        """Return what `remember` took of this buffer; itself if nothing was taken."""
        for copy in self._copies:
            if copy.live is buffer:
                return copy.saved
        return buffer

    def _modules(self) -> list[nn.Module]:
        """List every module once. `nn.Module.modules` takes several times as long."""
        found: list[nn.Module] = []
        waiting = list(self._roots)
        seen: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            found.append(module)
            waiting.extend(child for child in module._modules.values() if child is not None)
        return found

    def _registered_otherwise(self, modules: list[nn.Module]) -> bool:
        """Were buffers registered, removed or replaced since the places were listed?"""
        if sum(len(m._buffers) for m in modules) != self._count:
            return True
        return any(p.owner._buffers.get(p.key) is not p.buffer for p in self._places)


def keeps_statistics(module: nn.Module) -> bool:
    """Is it a norm layer whose running statistics change in the forward pass?"""
    return bool(getattr(module, "track_running_stats", False))


def _is_batch_counter(buffer: Tensor) -> bool:
    # Inference tensors have no version counter.
    return not buffer.is_floating_point() and not buffer.is_inference()


def _copies(places: list[_Place], small: int) -> list[_Copy]:
    """Copy each tensor once, however many places it has."""
    copies: dict[int, _Copy] = {}
    for place in places:
        buffer = place.buffer
        if buffer is None or is_lazy(buffer) or buffer.is_nested:
            continue
        if id(buffer) in copies or is_expanded(buffer):
            continue
        silent = keeps_statistics(place.owner)
        always = silent or buffer.numel() <= small
        saved = buffer.detach().clone()
        copies[id(buffer)] = _Copy(buffer, saved, buffer._version, always, silent)
    return list(copies.values())


# --- State that steps move and that no module and no optimizer holds: communication hooks,
# averagers.


Objects = Callable[[], Mapping[str, object]]


class AttachedState:
    """The memory of some objects before a step, and how it is put back after a veto."""

    def __init__(self, objects: Objects) -> None:
        """`objects`: those that there are now, by name; hooks may be registered at any time."""
        self._objects = objects
        self._places: dict[tuple[int, Any], _AttachedStatePlace] = {}
        self._holders: list[_Holder] = []

    def __bool__(self) -> bool:
        return bool(self._objects())

    def remember(self) -> None:
        """Take the present values: tensors that are replaced in every step are only held."""
        places: dict[tuple[int, Any], _AttachedStatePlace] = {}
        self._holders = []
        for item in self._objects().values():
            for holder in _holders(item):
                self._holders.append(holder)
                for key, value in holder.kept().items():
                    place = self._places.get((id(holder.item), key)) or _AttachedStatePlace()
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


class _AttachedStatePlace:
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


# --- Parameters and buffers of one root module as named tensors, and back into the module.


def module_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, also the buffers that `state_dict` leaves out."""
    found: dict[str, Tensor] = dict(root.named_parameters())
    for name, buffer in root.named_buffers():
        if is_lazy(buffer) or not is_expanded(buffer):
            found[name] = buffer
    return found


def module_misfit(
    prefix: str, root: nn.Module, stored: Mapping[str, Tensor], *, may_lack: bool
) -> str:
    """Say why the stored tensors cannot go into the module; empty if they can.

    `may_lack`: the module may have parameters that were not stored.
    """
    parameters = dict(root.named_parameters())
    lacking = [name for name in parameters if name not in stored]
    if lacking and not may_lack:
        return f"{prefix}{lacking[0]} is in the model and not in the saved state"
    for name, tensor in stored.items():
        live = parameters.get(name)
        if live is None and _buffer_owner(root, name) is None:
            return f"{prefix}{name} is in the saved state and not in the model"
        if live is not None and not _takes(live, tensor):
            return (
                f"{prefix}{name} is {dtype_and_shape(local_part(live))} in the model "
                f"and {dtype_and_shape(tensor)} in the saved state"
            )
    return ""


def _takes(live: Tensor, tensor: Tensor) -> bool:
    """A lazy parameter takes any shape."""
    if is_lazy(live):
        return True
    own = local_part(live)
    return own.shape == tensor.shape and own.dtype == tensor.dtype


def why_not_kept(tensor: Tensor) -> str:
    """Say what keeps this tensor from being copied into a snapshot or a file; empty if nothing."""
    if is_lazy(tensor):
        return "has no shape before the model is called for the first time"
    if tensor.is_meta:
        return "is on the meta device and has no data"
    if tensor.is_nested:
        return "is a nested tensor; only dense ones can be kept"
    if tensor.layout is not torch.strided:
        return f"is a {tensor.layout} tensor; only dense ones can be kept"
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}); only plain ones can be kept"
    return ""


@torch.no_grad()
def fill_module(root: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy the stored tensors into the module's own; register buffers that do not fit."""
    live = module_tensors(root)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    made_or_resized: list[str] = []
    for name, tensor in stored.items():
        own = _own_memory(live.get(name), tensor)
        if own is None:
            made_or_resized.append(name)
            continue
        targets.append(own)
        sources.append(tensor)
    if targets:
        foreach_copy_(targets, sources)
    device = next((tensor.device for tensor in live.values()), None)
    for name in made_or_resized:
        owner = _buffer_owner(root, name)
        if owner is not None:
            owner._buffers[name.rpartition(".")[2]] = stored[name].clone().to(device)


def _own_memory(target: Tensor | None, stored: Tensor) -> Tensor | None:
    """Return what this rank holds of a live tensor; None where the stored one has another shape."""
    if target is None:
        return None
    if is_lazy(target):
        target.materialize(stored.shape)  # type: ignore[attr-defined]
    own = local_part(target.detach())
    return own if own.shape == stored.shape else None


def _buffer_owner(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module that has a buffer of this name registered, filled or None."""
    path, _, key = name.rpartition(".")
    try:
        owner = root.get_submodule(path)
    except AttributeError:
        return None
    if key not in owner._buffers:
        return None
    return owner


# --- Copy all that an update may touch: parameters, the whole optimizer, the optimizers inside
# it.


WRITTEN_BY_OTHERS = frozenset({"_opt_called", "_zero_grad_profile_name"})
"""Attributes of an optimizer that schedulers and the profiler write."""


class UndoCopy:
    """Param_groups, state (whatever its keys are) and plain attributes before `optimizer.step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        own = vars(optimizer)
        self._unknown = sorted(key for key, value in own.items() if not _is_known(key, value))
        hooks = {key for key in own if key.endswith("_hooks")}
        skip = WRITTEN_BY_OTHERS | hooks | set(self._unknown)
        scope = Scope(everything=True)
        self._kept = KeptMapping(own, scope, attributes=True, skip=frozenset(skip))

    def restore(self) -> tuple[str, ...]:
        """Undo the update, in the same objects. Return the names of what cannot be compared."""
        if self._kept.moved(set()):
            self._kept.restore(set())
        own = vars(self._optimizer)
        kind = type(self._optimizer).__name__
        return tuple(f"{kind}.{key} ({type(own[key]).__name__})" for key in self._unknown)


def _is_known(key: str, value: Any) -> bool:
    """True for what can be compared and put back, and for what holds nothing."""
    if key.endswith("_hooks") or callable(value) or isinstance(value, Optimizer):
        return True
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor)) or is_array(value):
        return True
    return has_attributes(value)

"""Remember buffers (and attributes of modules) before a step, and put them back after a veto.

The forward pass changes them, so a vetoed step must put them back. Norm layers change theirs
without raising the tensor's version counter, so they are copied in every step, as are small
buffers. Large ones (position tables, masks) are copied once and again only when their version
counter moved.

Not covered: a large buffer that is written through `.data` (the counter does not see it) keeps what
the step left, and a buffer registered under a new name during the step stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stepguard.state.python_state import (
    ATOMS,
    CONTAINERS,
    SMALL,
    AttributeKeeper,
    KeptContainer,
    Scope,
    has_attributes,
    is_array,
)
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
        self._places: list[tuple[nn.Module, str, Tensor | None]] = []
        """Where each buffer is registered. It may be None, and one tensor may have several."""
        self._statistics: list[tuple[nn.Module, str, Tensor | None]] = []
        self._copies: dict[int, _Copy] = {}
        self._modules: list[nn.Module] = []
        """Every module below the roots, listed again where modules have come, gone or changed."""
        self._children: list[dict[str, nn.Module | None]] = []
        self._listed: list[nn.Module | None] = []
        self._registers: list[dict[str, Tensor | None]] = []
        self._registered: list[Tensor | None] = []
        self._marked: list[Tensor] = []
        self._marks: list[int] = []
        self._attributes = AttributeKeeper()

    def remember(self) -> None:
        """Take the present values, by in-place copies into memory that is allocated once."""
        otherwise = self._registered_otherwise()
        if otherwise or self._attributes.owns:
            self._attributes.remember(self._modules)
        if otherwise:
            self._start_over()
        elif self._copies:
            stale = [c for c in self._copies.values() if c.always or c.live._version != c.version]
            if stale:
                foreach_copy_([c.saved for c in stale], [c.live.detach() for c in stale])
            for copy in stale:
                copy.version = copy.live._version

    def _start_over(self) -> None:
        self._places = []
        for module in self._modules:
            self._places += [(module, key, buffer) for key, buffer in module._buffers.items()]
        self._registers = [module._buffers for module in self._modules]
        self._registered = [buffer for _, _, buffer in self._places]
        self._statistics = [place for place in self._places if keeps_statistics(place[0])]
        self._copies = {}
        for owner, _, buffer in self._places:
            if buffer is None or is_lazy(buffer) or buffer.is_nested:
                continue
            if id(buffer) in self._copies or is_expanded(buffer):
                continue
            silent = keeps_statistics(owner)
            always = silent or buffer.numel() <= self._small
            saved = buffer.detach().clone()
            self._copies[id(buffer)] = _Copy(buffer, saved, buffer._version, always, silent)

    @property
    def any(self) -> bool:
        """Are there buffers at all, filled or not?"""
        return bool(self._places)

    def statistics(self) -> list[Tensor]:
        """Return the running statistics of norm layers as they are, without walking the model."""
        live = [owner._buffers.get(key) for owner, key, _ in self._statistics]
        return [buffer for buffer in live if buffer is not None and buffer.is_floating_point()]

    def mark(self) -> None:
        """Start observing for `norms_ran`."""
        self._marked = []
        if not self._statistics:
            return
        for _, _, buffer in self._statistics:
            # Inference tensors have no version counter.
            if buffer is not None and not buffer.is_floating_point() and not buffer.is_inference():
                self._marked.append(buffer)
        self._marks = versions(self._marked)

    def norms_ran(self) -> bool:
        """Has a norm layer run since `mark`? Its batch counter is written in place."""
        return bool(self._marked) and bool(written_since(self._marked, self._marks))

    def restore(self) -> None:
        """Go back to what `remember` took, the same tensor objects included."""
        self._attributes.restore()
        for owner, key, buffer in self._places:
            owner._buffers[key] = buffer
        with torch.no_grad():
            for copy in self._copies.values():
                if copy.always or copy.moved:
                    copy.live.copy_(copy.saved)
                    copy.version = copy.live._version

    def written(self) -> list[Tensor]:
        """Return the floating-point buffers written or replaced since `remember`.

        Those of norm layers are left out: `statistics` gives them, and their counters do not show
        it. Does not walk the model.
        """
        return [buffer for _, buffer in self.written_at()]

    def written_at(self) -> list[tuple[tuple[int, str], Tensor]]:
        """Return what `written` does, with the place of each: its module's id and its name."""
        found: list[tuple[tuple[int, str], Tensor]] = []
        for owner, key, buffer in self._places:
            present = owner._buffers.get(key)
            if present is None or not present.is_floating_point():
                continue
            copy = self._copies.get(id(present))
            written = copy is not None and copy.moved and not copy.silent
            if written or present is not buffer:
                found.append(((id(owner), key), present))
        return found

    def changing(self) -> bool:
        """Has a forward pass changed anything since `remember`? Norm layers are presumed to."""
        if self._copies and any(c.silent or c.moved for c in self._copies.values()):
            return True
        if self._registered_otherwise():
            return True
        return bool(self._attributes.owns) and self._attributes.moved()

    def as_remembered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors by name, with what `remember` took in place of every live buffer."""
        # By address: detached references share their memory with the buffer, not its identity.
        copies = self._copies.values()
        taken = {copy.live.data_ptr(): copy.saved for copy in copies if copy.live.numel()}
        found = dict(tensors)
        for name, tensor in tensors.items():
            saved = taken.get(tensor.data_ptr()) if tensor.numel() else None
            if saved is not None and saved.shape == tensor.shape:
                found[name] = saved
        return found

    def remembered(self, buffer: Tensor) -> Tensor:
        """Return what `remember` took of this buffer; itself if nothing was taken."""
        copy = self._copies.get(id(buffer))
        if copy is None:
            return buffer
        return copy.saved

    def _registered_otherwise(self) -> bool:
        """Were buffers registered, removed or replaced since the places were listed?

        Passes in C over what was listed then: a large model has thousands of modules.
        """
        # modules are equal where they are the same; of tensors `==` would compare the elements
        listed = list(chain.from_iterable(map(dict.values, self._children)))
        if not self._modules or listed != self._listed:
            self._list_modules()
            return True
        if sum(map(len, self._registers)) != len(self._registered):
            return True
        if not self._registered:
            return False
        registered = chain.from_iterable(map(dict.values, self._registers))
        return not all(map(is_, registered, self._registered))

    def _list_modules(self) -> None:
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
        self._modules = found
        self._children = [module._modules for module in found]
        self._listed = list(chain.from_iterable(map(dict.values, self._children)))


def keeps_statistics(module: nn.Module) -> bool:
    """Is it a norm layer whose running statistics change in the forward pass?"""
    return bool(getattr(module, "track_running_stats", False))


# --- State that steps move and that no module and no optimizer holds: communication hooks,
# averagers.


Objects = Callable[[], Mapping[str, object]]


class AttachedState:
    """The memory of some objects before a step, and how it is put back after a veto."""

    def __init__(self, objects: Objects) -> None:
        """`objects`: those that there are now, by name; hooks may be registered at any time."""
        self._objects = objects
        self._kept: dict[int, KeptContainer] = {}

    def __bool__(self) -> bool:
        return bool(self._objects())

    def remember(self) -> None:
        """Take the present values: tensors that are replaced in every step are only held."""
        before = self._kept
        self._kept = {}
        for item in self._objects().values():
            kept = before.get(id(item))
            if kept is None:
                kept = KeptContainer(_entries(item), Scope("hooks"), attributes=True)
            else:
                kept.refresh(set())
            self._kept[id(item)] = kept

    def restore(self) -> list[str]:
        """Go back to what `remember` took; return the names of what had to be set to 0 instead."""
        seen: set[int] = set()
        reset: list[str] = []
        for kept in self._kept.values():
            reset += kept.restore(seen)
        return reset

    # --- in snapshots and checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything kept, by object; tensors are the live ones."""
        return {name: _as_tree(item) for name, item in self._objects().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back into the objects of the same names."""
        for name, item in self._objects().items():
            if name in state:
                _fill(_entries(item), state[name])


class _Attributes(MutableMapping[str, Any]):
    """The attributes of an object, also of one with slots, as PowerSGD's state is."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __iter__(self) -> Iterator[str]:
        for kind in type(self.owner).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(self.owner, name):
                    yield name
        yield from getattr(self.owner, "__dict__", ())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)


def _entries(item: Any) -> Any:
    if isinstance(item, dict | list):
        return item
    return _Attributes(item)


def _is_kept(value: object) -> bool:
    return isinstance(value, (*ATOMS, Tensor, dict, list, tuple)) or _is_generator(value)


def _is_generator(value: object) -> bool:
    """True for torch's and numpy's generators of random numbers."""
    return callable(getattr(value, "get_state", None)) and hasattr(value, "set_state")


def _as_tree(item: Any) -> Any:
    """Plain values and tensors only; a generator by its state."""
    if isinstance(item, list):
        return [_as_tree(value) for value in item]
    if isinstance(item, (*ATOMS, Tensor, tuple)):
        return item
    if not _is_generator(item):
        return {key: _as_tree(value) for key, value in _entries(item).items() if _is_kept(value)}
    state = item.get_state()
    if isinstance(state, Tensor):
        return state
    # numpy's: a tuple with one array
    return [part.tolist() if hasattr(part, "tolist") else part for part in state]


@torch.no_grad()
def _fill(live: Any, tree: Any) -> None:
    """Write a tree into a list, a dict or attributes, into the same tensors where they fit."""
    present = dict(enumerate(live))
    if not isinstance(live, list):
        present = dict(live)
    if isinstance(live, dict):
        for key in present.keys() - tree.keys():
            if _is_kept(present[key]):
                del live[key]
    for key, value in enumerate(tree) if isinstance(tree, list) else tree.items():
        now: Any = present.get(key)
        if _is_generator(now):
            now.set_state(tuple(value) if isinstance(value, list) else value)
        elif isinstance(now, dict | list):
            _fill(now, value)
        elif isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape:
            now.copy_(value)
        else:
            live[key] = value.detach().clone() if isinstance(value, Tensor) else value


def hooks_of(model: nn.Module) -> AttachedState:
    """What the hooks remember that DDP calls with its gradients; other models have none."""
    if not isinstance(model, DistributedDataParallel):
        return AttachedState(dict)
    return AttachedState(partial(communication_hooks, model))


def communication_hooks(model: DistributedDataParallel) -> dict[str, object]:
    """States of the hooks that DDP calls with its gradients, by place and class."""
    found: dict[str, object] = {}
    for number, (_, state) in enumerate(model._comm_hooks):
        if isinstance(state, (*ATOMS, dist.ProcessGroup)):
            continue
        # An object of values and process groups; torchft's manager holds threads, say.
        values: Any = state
        if not isinstance(state, list):
            values = _entries(state).values()
        if all(_is_kept(value) or isinstance(value, dist.ProcessGroup) for value in values):
            found[f"{number}:{type(state).__name__}"] = state
    return found


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
        # A lazy parameter takes any shape.
        if live is None or is_lazy(live):
            continue
        here = dtype_and_shape(local_part(live))
        there = dtype_and_shape(tensor)
        if here != there:
            return f"{prefix}{name} is {here} in the model and {there} in the saved state"
    return ""


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
        target = live.get(name)
        if target is not None:
            if is_lazy(target):
                target.materialize(tensor.shape)  # type: ignore[attr-defined]
            target = local_part(target.detach())
        if target is None or target.shape != tensor.shape:
            made_or_resized.append(name)
            continue
        targets.append(target)
        sources.append(tensor)
    if targets:
        foreach_copy_(targets, sources)
    device = next((tensor.device for tensor in live.values()), None)
    for name in made_or_resized:
        owner = _buffer_owner(root, name)
        if owner is not None:
            owner._buffers[name.rpartition(".")[2]] = stored[name].clone().to(device)


def _buffer_owner(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module that has a buffer of this name registered, filled or None."""
    path, _, key = name.rpartition(".")
    try:
        owner = root.get_submodule(path)
    except AttributeError:
        return None
    if key in owner._buffers:
        return owner
    return None


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
        self._kept = KeptContainer(own, Scope("update"), attributes=True, skip=skip)

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

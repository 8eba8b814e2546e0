"""The whole state of a run as named tensors and plain facts, and back into the live objects.

Tensors are `model/NAME`, `module:ROOT/NAME`, `extra:OBJECT/NAME`, `optimizer/PARAMETER/SLOT`, `scaler/...`,
`rng/RANK/...`; optimizer state goes by the parameter's name, so that the order of parameters does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import StepguardError
from stepguard.state.buffers import expanded
from stepguard.state.numbers import ModuleNumbers
from stepguard.state.plain import put_together, take_apart
from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_apart, rng_together
from stepguard.state.sharded import why_sharded

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of a parameter group that choose a kernel: they are the program's, not the state's."""


class StateError(StepguardError):
    """The state cannot be kept, or does not fit the objects it should go into; says which part."""


@dataclass(slots=True)
class State:
    """One moment of a run. `facts` holds JSON values only."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Whole:
    """Gathers the state of the user's objects without copying it, and puts a copy of it back in place."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        extra: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> None:
        self._optimizer, self._scheduler, self._scaler, self._rank = optimizer, scheduler, scaler, rank
        self._modules = {f"module:{name}/" if name else "model/": root for name, root in roots.items()}
        self._others: dict[str, Any] = {}
        for name, item in (extra or {}).items():
            kept = self._modules if isinstance(item, nn.Module) else self._others
            kept[f"extra:{name}/"] = item
        self._numbers = ModuleNumbers(self._modules)

    # --- gathering ---------------------------------------------------------------------------------------------

    def gather(self) -> State:
        """References to the live tensors, and everything else as plain values. Never waits for the device."""
        why = why_sharded(self._modules.values(), self._optimizer)
        if why:
            raise StateError(why)
        tensors: dict[str, Tensor] = {}
        for prefix, root in self._modules.items():
            tensors.update((prefix + name, tensor.detach()) for name, tensor in _stored(root).items())
        facts = {
            **self._optimizer_facts(tensors),
            "scheduler": self._apart(self._scheduler, tensors, "scheduler"),
            "scaler": scaler_apart(self._scaler, tensors),
            "extra": {name: self._apart(item, tensors, name.rstrip("/")) for name, item in self._others.items()},
            "numbers": _apart(self._numbers.moved(), tensors, "numbers"),
            "rng": {str(self._rank): rng_apart(capture_rng(), tensors, f"rng/{self._rank}")},
        }
        odd = next((name for name, tensor in tensors.items() if tensor.layout is not torch.strided), None)
        if odd is not None:
            raise StateError(f"{odd} is a {tensors[odd].layout} tensor; only dense ones can be kept.")
        return State(tensors, facts)

    def _apart(self, item: Any, tensors: dict[str, Tensor], name: str) -> Any:
        return None if item is None else _apart(item.state_dict(), tensors, name)

    def _optimizer_facts(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        state, names = self._optimizer.state, self._names()
        slots = {name: _apart(state[p], tensors, f"optimizer/{name}") for p, name in names if p in state}
        known = {id(p): name for p, name in names}
        groups = [
            {
                "params": [known[id(p)] for p in group["params"]],
                "settings": _apart({k: v for k, v in group.items() if k != "params"}, tensors, f"group/{index}"),
            }
            for index, group in enumerate(self._optimizer.param_groups)
        ]
        return {"optimizer": slots, "groups": groups}

    def _names(self) -> list[tuple[Tensor, str]]:
        """What the optimizer updates, each with its dotted name; those in no module are numbered."""
        own = {id(p): f"{prefix.partition(':')[2]}{name}" for prefix, name, p in self._parameters()}
        given = [(p, f"group{g}[{i}]") for g, gr in enumerate(self._optimizer.param_groups) for i, p in _listed(gr)]
        return [(p, own.get(id(p), number)) for p, number in given]

    def _parameters(self) -> list[tuple[str, str, Tensor]]:
        found: dict[int, tuple[str, str, Tensor]] = {}
        for prefix, root in self._modules.items():
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), (prefix, name, parameter))
        return list(found.values())

    # --- putting back ------------------------------------------------------------------------------------------

    def misfit(self, state: State) -> str:
        """Why this state cannot go into the live objects, in words; empty when it can."""
        for prefix, root in self._modules.items():
            stored = {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}
            parameters = dict(root.named_parameters())
            lacking = next((name for name in parameters if name not in stored), None)
            if lacking is not None:
                return f"{prefix}{lacking} is in the model and not in the saved state"
            for name, tensor in stored.items():
                live = parameters.get(name)
                if live is None and _owner(root, name) is None:
                    return f"{prefix}{name} is in the saved state and not in the model"
                if live is not None and (live.shape, live.dtype) != (tensor.shape, tensor.dtype):
                    return f"{prefix}{name} is {_kind(live)} in the model and {_kind(tensor)} in the saved state"
        names, saved = {n for _, n in self._names()}, {n for g in state.facts["groups"] for n in g["params"]}
        odd = sorted(names ^ saved)
        return f"{odd[0]} is trained {'now' if odd[0] in names else 'in the saved state'} only" if odd else ""

    @torch.no_grad()
    def put_back(self, state: State) -> None:
        """Everything but the random numbers, into the same tensor objects where they exist."""
        why = self.misfit(state)
        if why:
            raise StateError(f"the saved state does not fit: {why}.")
        for prefix, root in self._modules.items():
            _fill(root, {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)})
        self._numbers.put_back(put_together(state.facts["numbers"], {}))
        self._put_back_optimizer(state)
        self._put_back_item(self._scheduler, state.facts["scheduler"], state.tensors)
        scaler_together(self._scaler, state.facts["scaler"], state.tensors)
        for name, item in self._others.items():
            self._put_back_item(item, state.facts["extra"].get(name), state.tensors)
        # last: loading a schedule must not leave other hyperparameters than those of the moment
        self._put_back_groups(state)

    @contextmanager
    def lent(self, state: State) -> Iterator[None]:
        """The parameters of that moment for a while; afterwards the live ones are back, untouched."""
        named = [(p, state.tensors.get(prefix + name)) for prefix, name, p in self._parameters()]
        kept = [(p, p.data) for p, value in named if value is not None]
        try:
            for parameter, value in named:
                if value is not None:
                    parameter.data = value.to(device=parameter.device, dtype=parameter.dtype)
            yield
        finally:
            for parameter, live in kept:
                parameter.data = live

    def distance(self, state: State) -> float | None:
        """How far the trained parameters are from those of that moment, over the norm they had then."""
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        moved = then = 0.0
        for prefix, name, parameter in self._parameters():
            kept = state.tensors.get(prefix + name)
            if id(parameter) in trained and kept is not None and kept.is_floating_point():
                wide = kept.double()
                moved += float((parameter.detach().to(wide) - wide).square().sum())
                then += float(wide.square().sum())
        return math.sqrt(moved / then) if then else None

    def random_numbers(self, state: State) -> RngState | None:
        """This rank's generators at that moment; None where the state has none for it."""
        facts = state.facts["rng"].get(str(self._rank))
        return rng_together(facts, state.tensors) if facts is not None else None

    def put_back_random_numbers(self, state: State) -> None:
        moment = self.random_numbers(state)
        if moment is not None:
            restore_rng(moment)

    def _put_back_item(self, item: Any, saved: Any, tensors: Mapping[str, Tensor]) -> None:
        if item is not None and saved is not None:
            item.load_state_dict(alike(item.state_dict(), put_together(saved, tensors)))

    def _put_back_optimizer(self, state: State) -> None:
        slots = state.facts["optimizer"]
        for parameter, name in self._names():
            if name in slots:
                _fill_slots(self._optimizer.state[parameter], slots[name], state.tensors, parameter.device)
            else:
                self._optimizer.state.pop(parameter, None)

    def _put_back_groups(self, state: State) -> None:
        saved = {name: group["settings"] for group in state.facts["groups"] for name in group["params"]}
        names = {id(p): name for p, name in self._names()}
        for group in self._optimizer.param_groups:
            if not group["params"]:
                continue
            settings = put_together(saved[names[id(group["params"][0])]], state.tensors)
            for key, value in settings.items():
                if key not in IMPLEMENTATION:
                    _put(group, key, value)


def scaler_apart(scaler: GradScaler | None, tensors: dict[str, Tensor]) -> bool:
    """Scale and growth counter, left on the device; False where there is nothing to keep yet."""
    if scaler is None or scaler._scale is None or scaler._growth_tracker is None:
        return False
    tensors["scaler/scale"] = scaler._scale.detach()
    tensors["scaler/growth_tracker"] = scaler._growth_tracker.detach()
    return True


def scaler_together(scaler: GradScaler | None, kept: bool, tensors: Mapping[str, Tensor]) -> None:
    if scaler is None or not kept:
        return
    scale, growth = tensors["scaler/scale"], tensors["scaler/growth_tracker"]
    if scaler._scale is not None and scaler._growth_tracker is not None:
        scaler._scale.copy_(scale)
        scaler._growth_tracker.copy_(growth)
    else:  # not used yet: it makes its tensors from these
        scaler._init_scale = float(scale)
        scaler._init_growth_tracker = int(growth)


def alike(live: Any, value: Any) -> Any:
    """The value with the containers of the live one: a Counter stays a Counter."""
    if isinstance(live, Mapping) and isinstance(value, Mapping):
        items = {key: alike(live.get(key), item) for key, item in value.items()}
        kind: Any = type(live)
        return items if kind is dict else kind(items)
    if isinstance(live, list | tuple) and isinstance(value, list | tuple) and len(live) == len(value):
        return type(value)(alike(a, b) for a, b in zip(live, value, strict=True))
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        return value.to(live.device)
    return value


def _apart(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    try:
        return take_apart(value, tensors, name)
    except ValueError as why:
        raise StateError(str(why)) from None


def _stored(root: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that `state_dict` leaves out."""
    buffers = {name: buffer for name, buffer in root.named_buffers() if not expanded(buffer)}
    return {**dict(root.named_parameters()), **buffers}


def _owner(root: nn.Module, name: str) -> nn.Module | None:
    """The module that has a buffer of this name registered, filled or not."""
    path, _, key = name.rpartition(".")
    try:
        owner = root.get_submodule(path)
    except AttributeError:
        return None
    return owner if key in owner._buffers else None


def _fill(root: nn.Module, stored: Mapping[str, Tensor]) -> None:
    live = _stored(root)
    same = [name for name, tensor in stored.items() if name in live and live[name].shape == tensor.shape]
    if same:
        torch._foreach_copy_([live[name].detach() for name in same], [stored[name] for name in same])
    device = next((tensor.device for tensor in live.values()), None)
    for name in stored.keys() - set(same):  # made or resized since
        owner = _owner(root, name)
        if owner is not None:
            owner._buffers[name.rpartition(".")[2]] = stored[name].clone().to(device)


def _fill_slots(live: Any, structure: Any, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """One parameter's optimizer state; tensors keep their identity where shape and dtype agree."""
    saved = {key: item for key, item in structure["mapping"] if isinstance(key, str)}
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, item in saved.items():
        mine, kept = live.get(key), tensors.get(item.get("tensor", ""))
        same = isinstance(mine, Tensor) and kept is not None and (mine.shape, mine.dtype) == (kept.shape, kept.dtype)
        if same and isinstance(mine, Tensor) and kept is not None:
            mine.copy_(kept)
        else:
            value = put_together(item, tensors)
            live[key] = value.to(device) if isinstance(value, Tensor) and value.dim() else value


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """A learning rate that is a tensor keeps its identity: compiled optimizers hold on to it."""
    if isinstance(group.get(key), Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _listed(group: dict[str, Any]) -> list[tuple[int, Tensor]]:
    return list(enumerate(group["params"]))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

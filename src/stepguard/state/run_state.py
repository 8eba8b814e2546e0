"""The whole state of a run as named tensors and plain facts, and back into the live objects.

Tensors are `model/NAME`, `module:ROOT/NAME`, `extra:OBJECT/NAME`, `optimizer/PARAMETER/SLOT`,
`optimizer_shared/...`, `optimizer_attribute/...`, `scaler/...`, `rng/RANK/...`; optimizer state
goes by the parameter's name, so that the order of parameters does not matter.
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
from stepguard.state.in_place import Refill, alike
from stepguard.state.module_counters import ModuleNumbers
from stepguard.state.odd_tensors import why_not_kept
from stepguard.state.optimizer_state import OptimizerState, ParameterNames
from stepguard.state.ownership import Ownership
from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_apart, rng_together
from stepguard.state.sharded import why_sharded
from stepguard.state.tree_json import NotPlainError, put_together, take_apart
from stepguard.tensors.dtypes import dtype_and_shape
from stepguard.tensors.names import optimizer_parameter_ids
from stepguard.tensors.torch_private import foreach_copy_, scaler_tensors, start_scaler
from stepguard.tensors.values import is_finite, is_lazy


class StateError(StepguardError):
    """The state cannot be kept, or does not fit the objects it should go into; says which part."""


@dataclass(slots=True)
class State:
    """One moment of a run. `facts` holds JSON values only."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Whole:
    """Gathers the state of the user's objects without copying it, and puts a copy of it back in
    place.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        extra: Mapping[str, Any] | None = None,
        rank: int = 0,
        ownership: Ownership | None = None,
    ) -> None:
        self._optimizer, self._scheduler, self._scaler, self._rank = (
            optimizer,
            scheduler,
            scaler,
            rank,
        )
        self._ownership = ownership or Ownership(roots, optimizer)
        self._modules = {
            f"module:{name}/" if name else "model/": root for name, root in roots.items()
        }
        self._others: dict[str, Any] = {}
        for name, item in (extra or {}).items():
            kept = self._modules if isinstance(item, nn.Module) else self._others
            kept[f"extra:{name}/"] = item
        self._numbers = ModuleNumbers(self._modules)
        self._names = ParameterNames(self._modules)
        self._memory = OptimizerState(optimizer, self._names)

    # --- gathering
    # ---------------------------------------------------------------------------------------------

    def gather(self) -> State:
        """References to the live tensors, and everything else as plain values. Never waits for the
        device.
        """
        why = why_sharded(self._modules.values(), self._optimizer)
        if why:
            raise StateError(why)
        self._ownership.look()
        tensors: dict[str, Tensor] = {}
        for prefix, root in self._modules.items():
            tensors.update(
                (prefix + name, _kept(prefix + name, tensor))
                for name, tensor in _stored(root).items()
            )
        facts = {
            **self._optimizer_facts(tensors),
            "scheduler": self._apart(self._scheduler, tensors, "scheduler"),
            "scaler": scaler_apart(self._scaler, tensors),
            "extra": {
                name: self._apart(item, tensors, name.rstrip("/"))
                for name, item in self._others.items()
            },
            "numbers": _apart(self._numbers.moved(), tensors, "numbers"),
            "rng": {str(self._rank): rng_apart(capture_rng(), tensors, f"rng/{self._rank}")},
        }
        for name, tensor in tensors.items():
            _kept(name, tensor)
        return State(tensors, facts)

    def _apart(self, item: Any, tensors: dict[str, Tensor], name: str) -> Any:
        return None if item is None else _apart(item.state_dict(), tensors, name)

    def _optimizer_facts(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        try:
            kept = self._memory.gather(tensors)
        except NotPlainError as why:
            raise StateError(str(why)) from None
        return {
            "optimizer": kept.pop("slots"),
            "groups": kept.pop("groups"),
            "optimizer_more": kept,
        }

    # --- putting back
    # ------------------------------------------------------------------------------------------

    def misfit(self, state: State, *, own_only: bool = False) -> str:
        """Why this state cannot go into the live objects, in words; empty when it can.

        `own_only`: for going back in a run. What has been added since is then left as it is, if it
        is finite.
        """
        for prefix, root in self._modules.items():
            why = self._misfit_of(prefix, root, state, own_only)
            if why:
                return why
        names = {name: p for p, name in self._names.of(self._optimizer)}
        saved = {name for group in state.facts["groups"] for name in group["params"]}
        if own_only:
            ruined = next(
                (name for name, p in names.items() if name not in saved and not is_finite(p)), None
            )
            if ruined is not None:
                return f"{ruined} was added since and is not finite"
        odd = sorted(saved - set(names) if own_only else set(names) ^ saved)
        return (
            f"{odd[0]} is trained {'now' if odd[0] in names else 'in the saved state'} only"
            if odd
            else ""
        )

    def _misfit_of(self, prefix: str, root: nn.Module, state: State, own_only: bool) -> str:
        stored = _below(prefix, state)
        parameters = dict(root.named_parameters())
        lacking = next((name for name in parameters if name not in stored), None)
        if lacking is not None and not own_only:
            return f"{prefix}{lacking} is in the model and not in the saved state"
        for name, tensor in stored.items():
            live = parameters.get(name)
            if live is None and _owner(root, name) is None:
                return f"{prefix}{name} is in the saved state and not in the model"
            if (
                live is not None
                and not is_lazy(live)
                and (live.shape, live.dtype) != (tensor.shape, tensor.dtype)
            ):
                return (
                    f"{prefix}{name} is {dtype_and_shape(live)} in the model and {dtype_and_shape(tensor)} in the "
                    f"saved state"
                )
        return ""

    def grown_since(self, state: State) -> bool:
        """Have parameters come since? Then the steps from there on cannot be run again as they
        were.
        """
        return not self.misfit(state, own_only=True) and bool(self.misfit(state))

    @torch.no_grad()
    def put_back(self, state: State, *, own_only: bool = False) -> list[str]:
        """Everything but the random numbers, into the same tensor objects where they exist.

        `own_only`: what another optimizer trains, buffers and numbers that go with it, and what has
        been added since stay as they are. Returns what could not be put back, in words.
        """
        why = self.misfit(state, own_only=own_only)
        if why:
            raise StateError(f"the saved state does not fit: {why}.")
        elsewhere = self._ownership.elsewhere() if own_only else set()
        left: dict[str, set[str]] = {}
        for prefix, root in self._modules.items():
            theirs = set() if prefix.startswith("extra:") else elsewhere
            left[prefix] = self._ownership.modules_elsewhere(root, theirs)
            stored = _below(prefix, state)
            skipped = {name for name, p in root.named_parameters() if id(p) in theirs}
            skipped |= {
                name for name, _ in root.named_buffers() if name.rpartition(".")[0] in left[prefix]
            }
            _fill(root, {name: tensor for name, tensor in stored.items() if name not in skipped})
        self._numbers.put_back(put_together(state.facts["numbers"], {}), left)
        facts = {
            "slots": state.facts["optimizer"],
            "groups": state.facts["groups"],
            **state.facts.get("optimizer_more", {}),
        }
        trouble = self._memory.put_back(facts, state.tensors)
        self._put_back_item(self._scheduler, state.facts["scheduler"], state.tensors)
        scaler_together(self._scaler, state.facts["scaler"], state.tensors)
        for name, item in self._others.items():
            self._put_back_item(item, state.facts["extra"].get(name), state.tensors)
        # last: loading a schedule must not leave other hyperparameters than those of the moment
        self._memory.put_back_groups(facts["groups"], Refill(state.tensors, {}))
        return trouble

    @contextmanager
    def lent(self, state: State) -> Iterator[None]:
        """The guard's own parameters of that moment for a while; afterwards the live ones are back,
        untouched.
        """
        own = self._ownership.own()
        named = [
            (p, state.tensors.get(prefix + name))
            for prefix, name, p in self._names.below()
            if id(p) in own
        ]
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
        """How far the trained parameters are from those of that moment, over the norm they had
        then.
        """
        trained = optimizer_parameter_ids(self._optimizer)
        moved = then = 0.0
        for prefix, name, parameter in self._names.below():
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


def scaler_apart(scaler: GradScaler | None, tensors: dict[str, Tensor]) -> bool:
    """Scale and growth counter, left on the device; False where there is nothing to keep yet."""
    live = None if scaler is None else scaler_tensors(scaler)
    if live is None:
        return False
    scale, growth = live
    tensors["scaler/scale"] = scale.detach()
    tensors["scaler/growth_tracker"] = growth.detach()
    return True


def scaler_together(scaler: GradScaler | None, kept: bool, tensors: Mapping[str, Tensor]) -> None:
    if scaler is None or not kept:
        return
    scale = tensors["scaler/scale"]
    growth = tensors["scaler/growth_tracker"]
    live = scaler_tensors(scaler)
    if live is None:
        start_scaler(scaler, float(scale), int(growth))
        return
    live_scale, live_growth = live
    live_scale.copy_(scale)
    live_growth.copy_(growth)


def _apart(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    try:
        return take_apart(value, tensors, name)
    except ValueError as why:
        raise StateError(str(why)) from None


def _below(prefix: str, state: State) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}


def _kept(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, without its graph; refused where it cannot be copied."""
    why = why_not_kept(tensor)
    if why:
        raise StateError(f"{name} {why}.")
    return tensor.detach()


def _stored(root: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that `state_dict` leaves out."""
    buffers = {
        name: buffer
        for name, buffer in root.named_buffers()
        if is_lazy(buffer) or not expanded(buffer)
    }
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
    for name, tensor in stored.items():
        if name in live and is_lazy(live[name]):
            live[name].materialize(tensor.shape)  # type: ignore[attr-defined]
    same = [
        name for name, tensor in stored.items() if name in live and live[name].shape == tensor.shape
    ]
    if same:
        foreach_copy_([live[name].detach() for name in same], [stored[name] for name in same])
    device = next((tensor.device for tensor in live.values()), None)
    for name in stored.keys() - set(same):  # made or resized since
        owner = _owner(root, name)
        if owner is not None:
            owner._buffers[name.rpartition(".")[2]] = stored[name].clone().to(device)

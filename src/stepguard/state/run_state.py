"""The whole state of a run as named tensors and plain facts, and back into the live objects.

Tensors are `model/NAME`, `module:ROOT/NAME`, `extra:OBJECT/NAME`, `optimizer/PARAMETER/SLOT`,
`optimizer_shared/...`, `optimizer_attribute/...`, `scaler/...`, `rng/RANK/...`; optimizer state
goes by the parameter's name, so that the order of parameters does not matter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import StateError
from stepguard.state.in_place import Refill, in_containers_of
from stepguard.state.module_counters import ModuleCounters
from stepguard.state.module_state import fill_module, module_misfit, module_tensors, why_not_kept
from stepguard.state.optimizer_state import OptimizerState, ParameterNames
from stepguard.state.ownership import Ownership
from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_from_facts, rng_to_facts
from stepguard.state.sharded import show_shards
from stepguard.state.tree_json import NotPlainError, tree_from_json, tree_to_json
from stepguard.tensors.names import optimizer_parameter_ids
from stepguard.tensors.sharding import TensorPart, is_distributed, part_of
from stepguard.tensors.torch_private import scaler_tensors, start_scaler
from stepguard.tensors.values import is_finite, local_part


@dataclass(slots=True)
class SavedState:
    """One moment of a run. `facts` holds JSON values only."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    parts: dict[str, TensorPart] = field(default_factory=dict)
    """Tensors of which this rank holds a part, and which part that is."""
    moment: int | None = None
    """Counts the states that were gathered in this process; None for one from a file."""

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with the prefix, without it."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


class RunState:
    """Gathers the state of the user's objects without copying it, and puts a copy back in place."""

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
        self.scaler = scaler
        """May be set later: a watched loop shows its scaler at the first scaled step."""
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._rank = rank
        self._ownership = ownership or Ownership(roots, optimizer)
        self._modules: dict[str, nn.Module] = {}
        self._others: dict[str, Any] = {}
        for name, root in roots.items():
            prefix = f"module:{name}/" if name else "model/"
            self._modules[prefix] = root
        for name, item in (extra or {}).items():
            kept = self._modules if isinstance(item, nn.Module) else self._others
            kept[f"extra:{name}/"] = item
        self._counters = ModuleCounters(self._modules)
        self._names = ParameterNames(self._modules)
        self._optimizer_state = OptimizerState(optimizer, self._names)
        self._optimizers = 0
        """Optimizers that this run has had before the present one."""
        self._parameters: dict[str, weakref.ref[Tensor]] = {}
        """Every parameter when the state was last gathered, by its name in the state."""
        self._moment = 0
        self._replaced: dict[str, tuple[int, int]] = {}
        """Parameters that another object has replaced: the first moment that shows it, and how many
        optimizers had been replaced by then."""

    def adopt(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        """Another optimizer trains from now on, perhaps with other parts of the model.

        An earlier state still gives weights to go back to; the optimizer then begins afresh.
        """
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._optimizer_state = OptimizerState(optimizer, self._names)
        self._optimizers += 1
        self._look_for_replaced()

    def _look_for_replaced(self) -> None:
        """Notice parameters that are other objects than at the last look."""
        self._moment += 1
        now = {prefix + name: parameter for prefix, name, parameter in self._names.below()}
        for name, known in self._parameters.items():
            if name in now and known() is not now[name]:
                self._replaced[name] = (self._moment, self._optimizers)
        self._parameters = {name: weakref.ref(parameter) for name, parameter in now.items()}

    def before_adoption(self, saved: SavedState) -> bool:
        """Was another optimizer at work then?"""
        return int(saved.facts.get("optimizers", 0)) != self._optimizers

    def _of_module(self, saved: SavedState, prefix: str) -> dict[str, Tensor]:
        """Return what was saved of a module, without parameters that have been replaced since."""
        stored = saved.below(prefix)
        for name in list(stored):
            moment, optimizers = self._replaced.get(prefix + name, (0, 0))
            if saved.moment is not None:
                since = moment > saved.moment
            else:
                since = optimizers > int(saved.facts.get("optimizers", 0))
            if since:
                del stored[name]
        return stored

    # --- gathering

    def gather(self) -> SavedState:
        """Return references to the live tensors, and the rest as plain values, without a sync."""
        self._ownership.look()
        show_shards(self._modules.values())
        saved = self.gather_modules()
        tensors = saved.tensors
        saved.facts.update(self.gather_optimizer(tensors))
        saved.facts["optimizers"] = self._optimizers
        self._look_for_replaced()
        saved.moment = self._moment
        saved.facts["scheduler"] = _item_apart(self._scheduler, tensors, "scheduler")
        saved.facts["scaler"] = _scaler_apart(self.scaler, tensors)
        saved.facts["extra"] = {
            name: _item_apart(item, tensors, name.rstrip("/"))
            for name, item in self._others.items()
        }
        saved.facts["rng"] = {
            str(self._rank): rng_to_facts(capture_rng(), tensors, f"rng/{self._rank}")
        }
        for name, tensor in tensors.items():
            if is_distributed(tensor):
                saved.parts[name] = part_of(tensor)
                tensors[name] = local_part(tensor.detach())
            _refuse_odd(name, tensors[name])
        return saved

    def parameter_parts(self) -> dict[str, TensorPart]:
        """Which part of every sharded parameter this rank holds, by the optimizer's name for it."""
        found: dict[str, TensorPart] = {}
        for parameter, name in self._names.of(self._optimizer):
            if is_distributed(parameter):
                found[name] = part_of(parameter)
        return found

    def gather_modules(self) -> SavedState:
        """Return parameters, buffers and plain counters of every module."""
        tensors: dict[str, Tensor] = {}
        for prefix, root in self._modules.items():
            for name, tensor in module_tensors(root).items():
                _refuse_odd(prefix + name, tensor)
                tensors[prefix + name] = tensor.detach()
        return SavedState(tensors, {"numbers": _apart(self._counters.moved(), tensors, "numbers")})

    def gather_optimizer(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add the optimizer's tensors to `tensors` and return the rest of its state as facts."""
        try:
            kept = self._optimizer_state.gather(tensors)
        except NotPlainError as why:
            raise StateError(str(why)) from None
        return {
            "optimizer": kept.pop("slots"),
            "groups": kept.pop("groups"),
            "optimizer_more": kept,
        }

    # --- does a saved state fit?

    def misfit(self, saved: SavedState, *, own_only: bool = False) -> str:
        """Say why this state cannot go into the live objects; empty if it can.

        `own_only`: for going back in a run. What has been added since then is left as it is, if it
        is finite.
        """
        for prefix, root in self._modules.items():
            stored = self._of_module(saved, prefix) if own_only else saved.below(prefix)
            why = module_misfit(prefix, root, stored, may_lack=own_only)
            if why:
                return why
        if "groups" not in saved.facts:
            return ""
        trained = {name: p for p, name in self._names.of(self._optimizer)}
        if own_only and self.before_adoption(saved):
            held = {name for prefix in self._modules for name in self._of_module(saved, prefix)}
            return _added_and_bad(trained, held)
        before = {name for group in saved.facts["groups"] for name in group["params"]}
        if own_only:
            return _added_and_bad(trained, before) or _trained_on_one_side(
                trained, before - set(trained)
            )
        return _trained_on_one_side(trained, before ^ set(trained))

    def grown_since(self, saved: SavedState) -> bool:
        """True if parameters were added since: later steps cannot be repeated from this state."""
        return not self.misfit(saved, own_only=True) and bool(self.misfit(saved))

    # --- putting back

    @torch.no_grad()
    def put_back(self, saved: SavedState, *, own_only: bool = False) -> list[str]:
        """Put back everything but the random numbers, into the same tensors where they exist.

        `own_only`: what another optimizer trains, buffers and counters that go with it, and what
        has been added since stay as they are. Returns what could not be put back, in words.
        """
        why = self.misfit(saved, own_only=own_only)
        if why:
            raise StateError(f"the saved state does not fit: {why}.")
        self.put_back_modules(saved, own_only=own_only)
        if own_only and self.before_adoption(saved):
            self._optimizer.state.clear()
            return []
        self._optimizers = int(saved.facts.get("optimizers", 0))
        trouble = self.put_back_optimizer(saved)
        _item_together(self._scheduler, saved.facts["scheduler"], saved.tensors)
        _scaler_together(self.scaler, saved.facts["scaler"], saved.tensors)
        for name, item in self._others.items():
            _item_together(item, saved.facts["extra"].get(name), saved.tensors)
        # Last: load_state_dict of a schedule may write hyperparameters of its own.
        self._optimizer_state.put_back_groups(saved.facts["groups"], Refill(saved.tensors, {}))
        return trouble

    @torch.no_grad()
    def put_back_modules(self, saved: SavedState, *, own_only: bool = False) -> None:
        """Put back parameters, buffers and counters."""
        elsewhere = self._ownership.elsewhere() if own_only else set()
        left: dict[str, set[str]] = {}
        for prefix, root in self._modules.items():
            theirs = set() if prefix.startswith("extra:") else elsewhere
            left[prefix] = self._ownership.modules_elsewhere(root, theirs)
            skipped = {name for name, p in root.named_parameters() if id(p) in theirs}
            for name, _ in root.named_buffers():
                if name.rpartition(".")[0] in left[prefix]:
                    skipped.add(name)
            stored = self._of_module(saved, prefix) if own_only else saved.below(prefix)
            fill_module(root, {name: t for name, t in stored.items() if name not in skipped})
        self._counters.put_back(tree_from_json(saved.facts["numbers"], {}), left)

    @torch.no_grad()
    def put_back_optimizer(self, saved: SavedState) -> list[str]:
        """Put back slots, groups and attributes; return in words what could not be put back."""
        facts = {
            "slots": saved.facts["optimizer"],
            "groups": saved.facts["groups"],
            **saved.facts.get("optimizer_more", {}),
        }
        return self._optimizer_state.put_back(facts, saved.tensors)

    @contextmanager
    def parameters_from(self, saved: SavedState) -> Iterator[None]:
        """Use the guard's own parameters of that moment inside; the live ones stay untouched."""
        own = self._ownership.own()
        live: list[tuple[Tensor, Tensor]] = []
        try:
            for prefix, name, parameter in self._names.below():
                value = saved.tensors.get(prefix + name)
                if value is None or id(parameter) not in own:
                    continue
                live.append((parameter, parameter.data))
                parameter.data = value.to(device=parameter.device, dtype=parameter.dtype)
            yield
        finally:
            for parameter, data in live:
                parameter.data = data

    def distance(self, saved: SavedState) -> float | None:
        """Return how far the trained parameters moved since, relative to their norm then."""
        trained = optimizer_parameter_ids(self._optimizer)
        moved = 0.0
        then = 0.0
        for prefix, name, parameter in self._names.below():
            kept = saved.tensors.get(prefix + name)
            if id(parameter) not in trained or kept is None or not kept.is_floating_point():
                continue
            wide = kept.double()
            moved += float((local_part(parameter.detach()).to(wide) - wide).square().sum())
            then += float(wide.square().sum())
        if not then:
            return None
        return math.sqrt(moved / then)

    def random_numbers(self, saved: SavedState) -> RngState | None:
        """Return this rank's generators at that moment; None if the state has none for it."""
        facts = saved.facts["rng"].get(str(self._rank))
        if facts is None:
            return None
        return rng_from_facts(facts, saved.tensors)

    def put_back_random_numbers(self, saved: SavedState) -> None:
        """Put this rank's generators back."""
        moment = self.random_numbers(saved)
        if moment is not None:
            restore_rng(moment)


def extra_tensors(extra: Mapping[str, Any], *, parameters: bool = True) -> dict[str, Tensor]:
    """Return what further objects of a run keep, by name. `parameters`: those of modules, too."""
    found: dict[str, Tensor] = {}
    for name, item in extra.items():
        if isinstance(item, nn.Module):
            kept = module_tensors(item) if parameters else dict(item.named_buffers())
            found.update({f"extra:{name}/{key}": tensor for key, tensor in kept.items()})
        else:
            # what cannot be kept is told when the state is gathered
            with suppress(Exception):
                _item_apart(item, found, f"extra:{name}")
    return found


def _added_and_bad(trained: Mapping[str, Tensor], before: set[str]) -> str:
    for name, parameter in trained.items():
        if name not in before and not is_finite(parameter):
            return f"{name} was added since and is not finite"
    return ""


def _trained_on_one_side(trained: Mapping[str, Tensor], odd: set[str]) -> str:
    if not odd:
        return ""
    first = min(odd)
    when = "now" if first in trained else "in the saved state"
    return f"{first} is trained {when} only"


def _refuse_odd(name: str, tensor: Tensor) -> None:
    why = why_not_kept(tensor)
    if why:
        raise StateError(f"{name} {why}.")


def _apart(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    try:
        return tree_to_json(value, tensors, name)
    except ValueError as why:
        raise StateError(str(why)) from None


def _item_apart(item: Any, tensors: dict[str, Tensor], name: str) -> Any:
    if item is None:
        return None
    return _apart(item.state_dict(), tensors, name)


def _item_together(item: Any, facts: Any, tensors: Mapping[str, Tensor]) -> None:
    if item is not None and facts is not None:
        item.load_state_dict(in_containers_of(item.state_dict(), tree_from_json(facts, tensors)))


def _scaler_apart(scaler: GradScaler | None, tensors: dict[str, Tensor]) -> bool:
    """Keep scale and growth counter as they are on the device; False if there are none yet."""
    live = None if scaler is None else scaler_tensors(scaler)
    if live is None:
        return False
    scale, growth = live
    tensors["scaler/scale"] = scale.detach()
    tensors["scaler/growth_tracker"] = growth.detach()
    return True


def _scaler_together(scaler: GradScaler | None, kept: bool, tensors: Mapping[str, Tensor]) -> None:
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

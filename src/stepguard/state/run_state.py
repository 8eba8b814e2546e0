"""The whole state of a run as named tensors and plain facts, and back into the live objects.

Tensors are `model/NAME`, `module:ROOT/NAME`, `extra:OBJECT/NAME`, `optimizer/PARAMETER/SLOT`,
`optimizer_shared/...`, `optimizer_attribute/...`, `scaler/...`, `rng/RANK/...`; optimizer state
goes by the parameter's name, so that the order of parameters does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepguard._errors import StateError
from stepguard.state.batch import (
    KnownTensors,
    NotPlainError,
    Refill,
    in_containers_of,
    tree_from_json,
    tree_to_json,
)
from stepguard.state.buffers import fill_module, module_misfit, module_tensors, why_not_kept
from stepguard.state.python_state import ModuleCounters
from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_from_facts, rng_to_facts
from stepguard.state.sharded import show_shards
from stepguard.tensors.names import (
    TensorPart,
    is_distributed,
    named_parameters,
    optimizer_parameter_ids,
    part_of,
)
from stepguard.tensors.torch_private import scaler_tensors, start_scaler
from stepguard.tensors.values import is_finite, local_part

# --- Everything an optimizer remembers: by parameter, shared, on its attributes, in optimizers
# inside.


IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of a parameter group that choose a kernel: they are the program's, not the state's."""
NOT_STATE = frozenset(
    {
        "state",
        "param_groups",
        "defaults",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
        "found_inf",
        "grad_scale",
        "_opt_called",
        "_step_count",
    }
)
"""Attributes that torch gives every optimizer, and those that scalers and schedulers add."""


class ParameterNames:
    """Parameters by their dotted name; those in no module are numbered."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def below(self) -> list[tuple[str, str, Tensor]]:
        """List prefix of the root, name and parameter, each parameter once."""
        found: dict[int, tuple[str, str, Tensor]] = {}
        for prefix, root in self._modules.items():
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), (prefix, name, parameter))
        return list(found.values())

    def of(self, optimizer: Optimizer, path: str = "") -> list[tuple[Tensor, str]]:
        """List what an optimizer updates. `path`: where it sits inside another one."""
        own = {id(p): f"{prefix.partition(':')[2]}{name}" for prefix, name, p in self.below()}
        named: list[tuple[Tensor, str]] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                loose = f"{path}group{number}[{position}]"
                named.append((parameter, own.get(id(parameter), loose)))
        return named


class OptimizerState:
    """One optimizer's memory, described without a copy and put back in place."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: ParameterNames,
        prefix: str = "optimizer",
        above: tuple[Optimizer, ...] = (),
    ) -> None:
        """`above`: the optimizers that hold this one."""
        self._optimizer = optimizer
        self._naming = names
        self._prefix = prefix
        self._inner: dict[str, OptimizerState] = {}
        self._holding: set[str] = set()
        """Attributes whose content is kept as an optimizer's."""
        chain = (*above, optimizer)
        for path, inner in inner_optimizers(optimizer):
            self._holding.add(path.partition(".")[0])
            # Optimizers may hold each other in a circle.
            if not any(inner is one for one in chain):
                self._inner[path] = OptimizerState(inner, names, f"{prefix}_inner/{path}", chain)
        kind = type(optimizer)
        # ZeroRedundancyOptimizer says what all ranks hold once they have sent it to one; each keeps
        # its own part here.
        usual = kind.state_dict is Optimizer.state_dict
        self._writes_itself = not usual and kind.__name__ != "ZeroRedundancyOptimizer"
        self._first: dict[str, Any] = {}
        """Attributes when the guard was built: one that never moves is a setting of the program."""
        # Raised again, and reported to the user, when the state is gathered.
        with suppress(NotPlainError):
            attributes = self._attributes(KnownTensors(self._known()))
            self._first = {key: facts for key, facts, _ in list(attributes)}

    def _names(self) -> list[tuple[Tensor, str]]:
        path = self._prefix.partition("_inner/")[2]
        return self._naming.of(self._optimizer, f"{path}." if path else "")

    def _known(self) -> dict[int, str]:
        return {id(p): name for p, name in self._names()}

    # --- gathering

    def gather(
        self, tensors: dict[str, Tensor], known: KnownTensors | None = None
    ) -> dict[str, Any]:
        """Add references to the live tensors to `tensors` and return the rest as plain facts.

        Raises NotPlainError for what has no name or cannot be kept.
        """
        known = known or KnownTensors()
        known.parameters = {**self._known(), **known.parameters}
        optimizer = self._optimizer

        def plain(value: Any, name: str) -> Any:
            return tree_to_json(value, tensors, name, known=known)

        slots: dict[str, Any] = {}
        shared: dict[Any, Any] = {}
        # torch declares tensors as keys; some optimizers use others.
        state: Mapping[Any, Any] = optimizer.state
        for key, value in state.items():
            if not isinstance(key, Tensor):
                shared[key] = value
                continue
            if id(key) not in known.parameters:
                raise NotPlainError(
                    f"{type(optimizer).__name__} keeps state of a parameter {list(key.shape)} that "
                    f"no group holds any more."
                )
            name = known.parameters[id(key)]
            slots[name] = plain(value, f"{self._prefix}/{name}")
        where = "group" if self._prefix == "optimizer" else f"{self._prefix}/group"
        groups: list[dict[str, Any]] = []
        for index, group in enumerate(optimizer.param_groups):
            names = [known.parameters[id(p)] for p in group["params"]]
            settings = plain(_settings(group), f"{where}/{index}")
            groups.append({"params": names, "settings": settings})
        more = {}
        if self._writes_itself:
            more = dict(optimizer.state_dict())
        more.pop("state", None)
        more.pop("param_groups", None)
        return {
            "slots": slots,
            "groups": groups,
            "shared": plain(shared, f"{self._prefix}_shared"),
            "attributes": self._kept_attributes(tensors, known),
            "present": sorted(key for key in vars(optimizer) if isinstance(key, str)),
            "inner": {path: inner.gather(tensors, known) for path, inner in self._inner.items()},
            "own": plain(more, f"{self._prefix}_own") if more else None,
        }

    def _kept_attributes(self, tensors: dict[str, Tensor], known: KnownTensors) -> dict[str, Any]:
        kept = {}
        for key, facts, found in self._attributes(known):
            if found or facts != self._first.get(key):
                kept[key] = facts
                tensors.update(found)
        return kept

    def _attributes(self, known: KnownTensors) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
        """Yield name, plain facts and tensors of every attribute that is a plain value."""
        for key, value in vars(self._optimizer).items():
            if key in NOT_STATE or key in self._holding:
                continue
            # torch's own lists of hooks are called _optimizer_...
            if key.startswith("_optimizer_") or callable(value):
                continue
            found: dict[str, Tensor] = {}
            name = f"{self._prefix}_attribute/{key}"
            if isinstance(value, torch.Generator):
                found[name] = value.get_state()
                yield key, {"generator": name}, found
                continue
            try:
                facts = tree_to_json(value, found, name, known=known)
            except NotPlainError:
                if not self._writes_itself and _holds_tensors(value, known.parameters):
                    kind = type(self._optimizer).__name__
                    raise NotPlainError(
                        f"{kind}.{key} is a {type(value).__name__} that holds tensors; only "
                        f"tensors, containers and plain values can be kept, or what "
                        f"{kind}.state_dict() returns."
                    ) from None
                continue
            yield key, facts, found

    # --- putting back

    def put_back(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        """Put the state back in place; return in words what could not be put back.

        Parameters and groups that the facts do not mention are left alone.
        """
        parameters = self._by_name()
        self._refill(facts, Refill(tensors, parameters))
        if facts.get("own") is None:
            return []
        optimizer = self._optimizer
        every = [optimizer, *(inner._optimizer for inner in self._inner.values())]
        before = [(one, one.state, one.param_groups) for one in every]
        trouble: list[str] = []
        try:
            live = optimizer.state_dict()
            own = tree_from_json(facts["own"], tensors, parameters)
            optimizer.load_state_dict({**live, **in_containers_of(live, own)})
        except Exception as fault:
            kind = type(optimizer).__name__
            trouble.append(
                f"{kind}.load_state_dict did not accept what {kind}.state_dict returned "
                f"({type(fault).__name__}: {fault}); its state, groups and plain "
                "attributes were restored without it"
            )
        finally:
            for one, state, groups in before:
                one.state = state
                one.param_groups = groups
        # Once more: torch's load_state_dict casts slots to the parameter's dtype and makes new
        # groups.
        self._refill(facts, Refill(tensors, parameters))
        return trouble

    def _refill(self, facts: Mapping[str, Any], refill: Refill) -> None:
        state: dict[Any, Any] = self._optimizer.state
        slots = facts["slots"]
        trained = {name for group in facts["groups"] for name in group["params"]}
        for parameter, name in self._names():
            if name in slots:
                state[parameter] = refill.value(state.get(parameter, {}), slots[name], parameter)
            elif name in trained:
                state.pop(parameter, None)
        shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        for key in shared:
            del state[key]
        state.update(refill.value(shared, facts["shared"]))
        self._refill_attributes(facts, refill)
        for path, inner in self._inner.items():
            if path in facts["inner"]:
                inner._refill(facts["inner"][path], refill)
        self.put_back_groups(facts["groups"], refill)

    def _refill_attributes(self, facts: Mapping[str, Any], refill: Refill) -> None:
        own = vars(self._optimizer)
        saved = facts["attributes"]
        for key, now, found in list(self._attributes(KnownTensors(self._known()))):
            if key in saved:
                continue
            if key not in facts["present"]:
                # The attribute was made since.
                del own[key]
            elif not found and key in self._first and now != self._first[key]:
                own[key] = refill.value(own[key], self._first[key])
        for key, structure in saved.items():
            if isinstance(structure, dict) and "generator" in structure:
                own[key].set_state(refill.value(None, {"tensor": structure["generator"]}))
            else:
                own[key] = refill.value(own.get(key), structure)

    def put_back_groups(self, groups: list[dict[str, Any]], refill: Refill) -> None:
        """Put back the hyperparameters of every group that shares a parameter with a saved one."""
        saved = {name: group["settings"] for group in groups for name in group["params"]}
        names = self._known()
        for group in self._optimizer.param_groups:
            known = [names[id(p)] for p in group["params"] if names[id(p)] in saved]
            for key, structure in saved[known[0]]["mapping"] if known else ():
                if key in IMPLEMENTATION:
                    continue
                live = group.get(key)
                value = refill.value(live, structure)
                # A rate that is a tensor stays the same object: compiled steps hold it.
                if isinstance(live, Tensor) and live is not value:
                    live.copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _by_name(self) -> dict[str, Tensor]:
        found = {name: p for p, name in self._names()}
        for inner in self._inner.values():
            found = {**inner._by_name(), **found}
        return found


def inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers that this one holds as an attribute, or in a list or dict."""
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield key, value
            continue
        entries: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, list | tuple):
            entries = enumerate(value)
        elif isinstance(value, dict) and key not in ("state", "defaults"):
            entries = value.items()
        for name, item in entries:
            if isinstance(item, Optimizer):
                yield f"{key}.{name}", item


def every_group(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of an optimizer and of those inside it."""
    waiting = [optimizer]
    seen = {id(optimizer)}
    while waiting:
        one = waiting.pop()
        yield from one.param_groups
        for _, inner in inner_optimizers(one):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters and without functions, dtypes and devices."""
    kept: dict[str, Any] = {}
    for key, value in group.items():
        of_the_program = callable(value) or isinstance(value, torch.dtype | torch.device)
        if key != "params" and not of_the_program:
            kept[key] = value
    return kept


def _holds_tensors(value: Any, parameters: Mapping[int, str], depth: int = 0) -> bool:
    """True for an object with tensors in it that are not parameters."""
    if isinstance(value, Tensor):
        return id(value) not in parameters and not isinstance(value, nn.Parameter)
    # Levels of foreign objects that are searched for tensors
    if depth > 3 or isinstance(value, nn.Module) or callable(value):
        return False
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    elif hasattr(value, "__dict__"):
        inside = vars(value).values()
    return any(_holds_tensors(item, parameters, depth + 1) for item in inside)


# --- Tell which parameters belong to a guard: those of its optimizer. Others are data to it.


class Ownership:
    """One guard's share of the modules it was given.

    Not its own: what another guarded optimizer holds, and what wants a gradient and is not in this
    optimizer. A frozen parameter that no optimizer holds (a teacher that the loop averages into) is
    its own.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], optimizer: Optimizer, others: Iterable[Optimizer] = ()
    ) -> None:
        """`others`: every optimizer with a guard; iterated again each time."""
        self._roots = roots
        self.optimizer = optimizer
        """May be set later: a loop may replace its optimizer."""
        self._others = others
        self._trained: set[int] = set()
        self.look()

    def look(self) -> None:
        """Remember what wants a gradient now: loops freeze a network while another one trains."""
        for _, parameter in named_parameters(self._roots):
            if parameter.requires_grad:
                self._trained.add(id(parameter))

    def own(self) -> set[int]:
        """Return the ids of what the optimizer, or one inside it, holds."""
        return _held_by(self.optimizer)

    def elsewhere(self) -> set[int]:
        """Return the ids of parameters below the roots that are trained elsewhere."""
        self.look()
        trained = set(self._trained)
        # A list: guards may come and go while it is read.
        for other in list(self._others):
            if other is not self.optimizer:
                trained |= _held_by(other)
        below = {id(parameter) for _, parameter in named_parameters(self._roots)}
        return (below - self.own()) & trained

    def modules_elsewhere(self, root: nn.Module, elsewhere: set[int]) -> set[str]:
        """Return paths of modules whose buffers and counters go with parameters `elsewhere`.

        A module without parameters belongs to the smallest one around it that has some.
        """
        if not elsewhere:
            return set()
        below = {path: {id(p) for p in m.parameters()} for path, m in root.named_modules()}
        own = self.own()
        found: set[str] = set()
        for path in below:
            around = path
            while around and not below[around]:
                around = around.rpartition(".")[0]
            held = below[around]
            if held & elsewhere and not held & own:
                found.add(path)
        return found


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in every_group(optimizer) for p in group["params"]}


# --- The whole state of a run as named tensors and plain facts, and back into the live objects.


@dataclass(slots=True)
class SavedState:
    """One moment of a run. `facts` holds JSON values only."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    parts: dict[str, TensorPart] = field(default_factory=dict)
    """Tensors of which this rank holds a part, and which part that is."""

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

    def adopt(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        """Another optimizer trains from now on, perhaps with other parts of the model.

        A rewind does not go back to states from before: the loop may have replaced parts of the
        model together with it.
        """
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._optimizer_state = OptimizerState(optimizer, self._names)
        self._optimizers += 1

    # --- gathering

    def gather(self) -> SavedState:
        """Return references to the live tensors, and the rest as plain values, without a sync."""
        self._ownership.look()
        show_shards(self._modules.values())
        saved = self.gather_modules()
        tensors = saved.tensors
        facts = saved.facts
        facts.update(self.gather_optimizer(tensors))
        facts["optimizers"] = self._optimizers
        facts["scheduler"] = _to_saved(self._scheduler, tensors, "scheduler")
        # Scale and growth counter as they are on the device; there are none before the first use.
        live = None
        if self.scaler is not None:
            live = scaler_tensors(self.scaler)
        facts["scaler"] = live is not None
        if live is not None:
            tensors["scaler/scale"] = live[0].detach()
            tensors["scaler/growth_tracker"] = live[1].detach()
        facts["extra"] = {}
        for name, item in self._others.items():
            facts["extra"][name] = _to_saved(item, tensors, name.rstrip("/"))
        rank = self._rank
        facts["rng"] = {str(rank): rng_to_facts(capture_rng(), tensors, f"rng/{rank}")}
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
        numbers = tree_to_json(self._counters.moved(), tensors, "numbers")
        return SavedState(tensors, {"numbers": numbers})

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
            why = module_misfit(prefix, root, saved.below(prefix), may_lack=own_only)
            if why:
                return why
        if "groups" not in saved.facts:
            return ""
        if own_only and saved.facts.get("optimizers", 0) != self._optimizers:
            return "another optimizer was at work then"
        trained = {name: p for p, name in self._names.of(self._optimizer)}
        before = {name for group in saved.facts["groups"] for name in group["params"]}
        odd = before ^ set(trained)
        if own_only:
            odd = before - set(trained)
            for name in sorted(trained.keys() - before):
                if not is_finite(trained[name]):
                    return f"{name} was added since and is not finite"
        if not odd:
            return ""
        when = "in the saved state"
        if min(odd) in trained:
            when = "now"
        return f"{min(odd)} is trained {when} only"

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
        self._optimizers = int(saved.facts.get("optimizers", 0))
        trouble = self.put_back_optimizer(saved)
        _from_saved(self._scheduler, saved.facts["scheduler"], saved.tensors)
        if self.scaler is not None and saved.facts["scaler"]:
            scale = saved.tensors["scaler/scale"]
            growth = saved.tensors["scaler/growth_tracker"]
            live = scaler_tensors(self.scaler)
            if live is None:
                start_scaler(self.scaler, float(scale), int(growth))
            else:
                live[0].copy_(scale)
                live[1].copy_(growth)
        for name, item in self._others.items():
            _from_saved(item, saved.facts["extra"].get(name), saved.tensors)
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
            stored = saved.below(prefix)
            fill_module(root, {name: t for name, t in stored.items() if name not in skipped})
        self._counters.put_back(tree_from_json(saved.facts["numbers"], {}), left)

    @torch.no_grad()
    def put_back_optimizer(self, saved: SavedState) -> list[str]:
        """Put back slots, groups and attributes; return in words what could not be put back."""
        facts = {
            "slots": saved.facts["optimizer"],
            "groups": saved.facts["groups"],
            **saved.facts["optimizer_more"],
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
            # what cannot be kept is reported when the state is gathered
            with suppress(Exception):
                _to_saved(item, found, f"extra:{name}")
    return found


def _refuse_odd(name: str, tensor: Tensor) -> None:
    why = why_not_kept(tensor)
    if why:
        raise StateError(f"{name} {why}.")


def _to_saved(item: Any, tensors: dict[str, Tensor], name: str) -> Any:
    if item is None:
        return None
    try:
        return tree_to_json(item.state_dict(), tensors, name)
    except ValueError as why:
        raise StateError(str(why)) from None


def _from_saved(item: Any, facts: Any, tensors: Mapping[str, Tensor]) -> None:
    if item is not None and facts is not None:
        item.load_state_dict(in_containers_of(item.state_dict(), tree_from_json(facts, tensors)))

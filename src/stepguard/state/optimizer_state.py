"""Everything an optimizer remembers: by parameter, shared, on its attributes, in optimizers inside.

Slots go by the parameter's name. Kept beside them: entries of `optimizer.state` that belong to no
parameter, plain attributes that hold tensors or have moved since the guard was built, the same of
inner optimizers (Lookahead, SAM), and what a `state_dict` of the optimizer's own adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.state.in_place import Refill, in_containers_of
from stepguard.state.tree_json import KnownTensors, NotPlainError, tree_from_json, tree_to_json

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
DEEPEST_SEARCH = 3
"""Levels of foreign objects that are searched for tensors."""


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
    """One optimizer's memory, taken apart without a copy and put back in place."""

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
        self._first = self._first_attributes()
        """Attributes when the guard was built: one that never moves is a setting of the program."""

    def _names(self) -> list[tuple[Tensor, str]]:
        path = self._prefix.partition("_inner/")[2]
        return self._naming.of(self._optimizer, f"{path}." if path else "")

    def _first_attributes(self) -> dict[str, Any]:
        try:
            return {key: facts for key, facts, _ in self._attributes(KnownTensors(self._known()))}
        except NotPlainError:
            # Raised again, and told to the user, when the state is gathered.
            return {}

    # --- gathering

    def gather(
        self, tensors: dict[str, Tensor], known: KnownTensors | None = None
    ) -> dict[str, Any]:
        """Add references to the live tensors to `tensors` and return the rest as plain facts.

        Raises NotPlainError for what has no name or cannot be kept.
        """
        known = known or KnownTensors()
        known.parameters = {**self._known(), **known.parameters}
        slots, shared = self._slots(tensors, known)
        return {
            "slots": slots,
            "groups": self._groups(tensors, known),
            "shared": shared,
            "attributes": self._kept_attributes(tensors, known),
            "present": sorted(key for key in vars(self._optimizer) if isinstance(key, str)),
            "inner": {path: inner.gather(tensors, known) for path, inner in self._inner.items()},
            "own": self._own(tensors, known),
        }

    def _known(self) -> dict[int, str]:
        return {id(p): name for p, name in self._names()}

    def _slots(self, tensors: dict[str, Tensor], known: KnownTensors) -> tuple[dict[str, Any], Any]:
        slots: dict[str, Any] = {}
        shared: dict[Any, Any] = {}
        # torch declares tensors as keys; some optimizers use others.
        state: Mapping[Any, Any] = self._optimizer.state
        for key, value in state.items():
            if not isinstance(key, Tensor):
                shared[key] = value
                continue
            name = known.parameters.get(id(key))
            if name is None:
                kind = type(self._optimizer).__name__
                raise NotPlainError(
                    f"{kind} keeps state of a parameter {list(key.shape)} that no group holds any "
                    f"more."
                )
            slots[name] = tree_to_json(value, tensors, f"{self._prefix}/{name}", known=known)
        return slots, tree_to_json(shared, tensors, f"{self._prefix}_shared", known=known)

    def _groups(self, tensors: dict[str, Tensor], known: KnownTensors) -> list[dict[str, Any]]:
        where = "group" if self._prefix == "optimizer" else f"{self._prefix}/group"
        groups: list[dict[str, Any]] = []
        for index, group in enumerate(self._optimizer.param_groups):
            names = [known.parameters[id(p)] for p in group["params"]]
            settings = tree_to_json(_settings(group), tensors, f"{where}/{index}", known=known)
            groups.append({"params": names, "settings": settings})
        return groups

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
                self._refuse_hidden_tensors(key, value, known)
                continue
            yield key, facts, found

    def _refuse_hidden_tensors(self, key: str, value: Any, known: KnownTensors) -> None:
        """Refuse an object that holds tensors if no state_dict says how to keep them."""
        if not _writes_itself(self._optimizer) and _holds_tensors(value, known.parameters):
            kind = type(self._optimizer).__name__
            raise NotPlainError(
                f"{kind}.{key} is a {type(value).__name__} that holds tensors; only tensors, "
                f"containers and plain values can be kept, or what {kind}.state_dict() returns."
            )

    def _own(self, tensors: dict[str, Tensor], known: KnownTensors) -> Any:
        """Return what an own `state_dict` says beyond state and groups; None for torch's."""
        if not _writes_itself(self._optimizer):
            return None
        said = self._optimizer.state_dict()
        more = {key: value for key, value in said.items() if key not in ("state", "param_groups")}
        if not more:
            return None
        return tree_to_json(more, tensors, f"{self._prefix}_own", known=known)

    # --- putting back

    def put_back(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        """Put the state back in place; return in words what could not be put back.

        Parameters and groups that the facts do not mention are left alone.
        """
        parameters = self._by_name()
        self._refill(facts, Refill(tensors, parameters))
        if facts.get("own") is None:
            return []
        trouble = self._load_own(tree_from_json(facts["own"], tensors, parameters))
        # Once more: torch's load_state_dict casts slots to the parameter's dtype and makes new
        # groups.
        self._refill(facts, Refill(tensors, parameters))
        return trouble

    def _refill(self, facts: Mapping[str, Any], refill: Refill) -> None:
        self._refill_slots(facts, refill)
        # A checkpoint of an earlier version does not mention them.
        if "shared" in facts:
            self._refill_shared(facts["shared"], refill)
            self._refill_attributes(facts, refill)
        for path, inner in self._inner.items():
            saved = facts.get("inner", {}).get(path)
            if saved is not None:
                inner._refill(saved, refill)
        self.put_back_groups(facts["groups"], refill)

    def _refill_slots(self, facts: Mapping[str, Any], refill: Refill) -> None:
        state = self._optimizer.state
        slots = facts["slots"]
        trained = {name for group in facts["groups"] for name in group["params"]}
        for parameter, name in self._names():
            if name in slots:
                live = state.get(parameter, {})
                state[parameter] = refill.value(live, slots[name], parameter)
            elif name in trained:
                state.pop(parameter, None)

    def _refill_shared(self, structure: Any, refill: Refill) -> None:
        state = self._optimizer.state
        mine = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        for key in mine:
            del state[key]
        state.update(refill.value(mine, structure))

    def _refill_attributes(self, facts: Mapping[str, Any], refill: Refill) -> None:
        own = vars(self._optimizer)
        saved = facts["attributes"]
        known = KnownTensors(self._known())
        for key, now, found in list(self._attributes(known)):
            if key in saved:
                continue
            if key not in facts["present"]:
                # The attribute was made since.
                del own[key]
            elif not found and key in self._first and now != self._first[key]:
                own[key] = refill.value(own[key], self._first[key])
        for key, structure in saved.items():
            if "generator" in structure:
                own[key].set_state(refill.value(None, {"tensor": structure["generator"]}))
            else:
                own[key] = refill.value(own.get(key), structure)

    def put_back_groups(self, groups: list[dict[str, Any]], refill: Refill) -> None:
        """Put back the hyperparameters of every group that shares a parameter with a saved one."""
        saved = {name: group["settings"] for group in groups for name in group["params"]}
        names = self._known()
        for group in self._optimizer.param_groups:
            known = [names[id(p)] for p in group["params"] if names[id(p)] in saved]
            if not known:
                continue
            for key, structure in saved[known[0]]["mapping"]:
                if key not in IMPLEMENTATION:
                    _put(group, key, refill.value(group.get(key), structure))

    def _load_own(self, own: Any) -> list[str]:
        optimizer = self._optimizer
        every = [optimizer, *(inner._optimizer for inner in self._inner.values())]
        before = [(one, one.state, one.param_groups) for one in every]
        try:
            live = optimizer.state_dict()
            optimizer.load_state_dict({**live, **in_containers_of(live, own)})
        except Exception as fault:
            kind = type(optimizer).__name__
            return [
                f"{kind}.load_state_dict did not take back what {kind}.state_dict gave "
                f"({type(fault).__name__}: {fault}); its state, groups and plain attributes are "
                f"back"
            ]
        finally:
            for one, state, groups in before:
                one.state = state
                one.param_groups = groups
        return []

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


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Write a setting. A rate that is a tensor stays the same object: compiled steps hold it."""
    live = group.get(key)
    if isinstance(live, Tensor) and live is not value:
        live.copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _writes_itself(optimizer: Optimizer) -> bool:
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        # says what all ranks hold once they have sent it to one; each keeps its own part here
        return False
    return type(optimizer).state_dict is not Optimizer.state_dict


def _holds_tensors(value: Any, parameters: Mapping[int, str], depth: int = 0) -> bool:
    """True for an object with tensors in it that are not parameters."""
    if isinstance(value, Tensor):
        return id(value) not in parameters and not isinstance(value, nn.Parameter)
    if depth > DEEPEST_SEARCH or isinstance(value, nn.Module) or callable(value):
        return False
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    elif hasattr(value, "__dict__"):
        inside = vars(value).values()
    return any(_holds_tensors(item, parameters, depth + 1) for item in inside)

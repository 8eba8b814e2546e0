"""Everything an optimizer remembers: by parameter, shared by all, on its own attributes, in
optimizers inside it.

Slots go by the parameter's name. Kept beside them: entries of `optimizer.state` that belong to no
parameter, plain attributes that hold tensors or have moved since the guard was built, the same of
inner optimizers (Lookahead, SAM), and what a `state_dict` of the optimizer's own adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.state.in_place import Refill, in_containers_of
from stepguard.state.tree_json import KnownTensors, NotPlainError, tree_from_json, tree_to_json

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of a parameter group that choose a kernel: they are the program's, not the state's."""
NO_MEMORY = frozenset(
    {
        *(
            "state",
            "param_groups",
            "defaults",
            "_warned_capturable_if_run_uncaptured",
            "_zero_grad_profile_name",
        ),
        *("found_inf", "grad_scale", "_opt_called", "_step_count"),
    }
)
"""Attributes that torch gives every optimizer, and what scalers and schedulers leave on it for
their own use.
"""
DEEPEST_LOOK = 3
"""Levels of foreign objects that are searched for tensors."""


class ParameterNames:
    """Parameters by their dotted name; those in no module are numbered."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def below(self) -> list[tuple[str, str, Tensor]]:
        """Prefix of the root, name and parameter, each parameter once."""
        found: dict[int, tuple[str, str, Tensor]] = {}
        for prefix, root in self._modules.items():
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), (prefix, name, parameter))
        return list(found.values())

    def of(self, optimizer: Optimizer, path: str = "") -> list[tuple[Tensor, str]]:
        """What an optimizer updates. `path`: where it sits inside another one."""
        own = {id(p): f"{prefix.partition(':')[2]}{name}" for prefix, name, p in self.below()}
        return [
            (p, own.get(id(p), f"{path}group{g}[{i}]"))
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        ]


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
        self._optimizer, self._naming, self._prefix = optimizer, names, prefix
        chain = (*above, optimizer)
        self._inner = {
            path: OptimizerState(inner, names, f"{prefix}_inner/{path}", chain)
            for path, inner in inner_optimizers(optimizer)
            if not any(inner is one for one in chain)
        }
        self._holding = {path.partition(".")[0] for path, _ in inner_optimizers(optimizer)}
        """Attributes whose content is kept as an optimizer's."""
        self._first = self._first_look()
        """Attributes when the guard was built: one that never moves is the program's own setting.
        """

    def _names(self) -> list[tuple[Tensor, str]]:
        path = self._prefix.partition("_inner/")[2]
        return self._naming.of(self._optimizer, f"{path}." if path else "")

    def _first_look(self) -> dict[str, Any]:
        try:
            return {key: facts for key, facts, _ in self._attributes(KnownTensors(self._known()))}
        except NotPlainError:  # said when the state is gathered
            return {}

    # --- taking apart
    # ------------------------------------------------------------------------------------------

    def gather(
        self, tensors: dict[str, Tensor], known: KnownTensors | None = None
    ) -> dict[str, Any]:
        """Plain facts, and references to the live tensors in `tensors`. Raises NotPlainError for
        what has no name.
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
        state: Mapping[Any, Any] = (
            self._optimizer.state
        )  # torch declares tensors as keys, and others are met
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
        return [
            {
                "params": [known.parameters[id(p)] for p in group["params"]],
                "settings": tree_to_json(
                    _settings(group), tensors, f"{where}/{index}", known=known
                ),
            }
            for index, group in enumerate(self._optimizer.param_groups)
        ]

    def _kept_attributes(self, tensors: dict[str, Tensor], known: KnownTensors) -> dict[str, Any]:
        kept = {}
        for key, facts, found in self._attributes(known):
            if found or facts != self._first.get(key):
                kept[key] = facts
                tensors.update(found)
        return kept

    def _attributes(self, known: KnownTensors) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
        """Name, plain facts and tensors of every attribute that is a plain value."""
        for key, value in vars(self._optimizer).items():
            if (
                key in NO_MEMORY
                or key.startswith("_optimizer_")
                or callable(value)
                or key in self._holding
            ):
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
        """An object of the user's own is left alone, unless it holds tensors and nothing says how
        to keep them.
        """
        if not _writes_itself(self._optimizer) and _holds_tensors(value, known.parameters):
            kind = type(self._optimizer).__name__
            raise NotPlainError(
                f"{kind}.{key} is a {type(value).__name__} that holds tensors; only tensors, "
                f"containers and plain "
                f"values can be kept, or what {kind}.state_dict() returns."
            )

    def _own(self, tensors: dict[str, Tensor], known: KnownTensors) -> Any:
        """What a `state_dict` of the optimizer's own says beyond state and groups; None for
        torch's.
        """
        if not _writes_itself(self._optimizer):
            return None
        said = self._optimizer.state_dict()
        more = {key: value for key, value in said.items() if key not in ("state", "param_groups")}
        return tree_to_json(more, tensors, f"{self._prefix}_own", known=known) if more else None

    # --- putting back
    # ------------------------------------------------------------------------------------------

    def put_back(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        """In place. Parameters and groups the facts say nothing about are left alone. Says what
        could not be done.
        """
        parameters = self._by_name()
        self._refill(facts, Refill(tensors, parameters))
        if facts.get("own") is None:
            return []
        trouble = self._load_own(tree_from_json(facts["own"], tensors, parameters))
        # torch's loading casts slots to the parameter's dtype and makes new groups
        self._refill(facts, Refill(tensors, parameters))
        return trouble

    def _refill(self, facts: Mapping[str, Any], refill: Refill) -> None:
        self._refill_slots(facts, refill)
        if "shared" in facts:  # a checkpoint of an earlier version says nothing about them
            self._refill_shared(facts["shared"], refill)
            self._refill_attributes(facts, refill)
        for path, inner in self._inner.items():
            saved = facts.get("inner", {}).get(path)
            if saved is not None:
                inner._refill(saved, refill)
        self.put_back_groups(facts["groups"], refill)

    def _refill_slots(self, facts: Mapping[str, Any], refill: Refill) -> None:
        state, slots = self._optimizer.state, facts["slots"]
        trained = {name for group in facts["groups"] for name in group["params"]}
        for parameter, name in self._names():
            if name in slots:
                state[parameter] = refill.value(
                    state.get(parameter, {}), slots[name], parameter.device
                )
            elif name in trained:
                state.pop(parameter, None)

    def _refill_shared(self, structure: Any, refill: Refill) -> None:
        state = self._optimizer.state
        mine = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        for key in mine:
            del state[key]
        state.update(refill.value(mine, structure))

    def _refill_attributes(self, facts: Mapping[str, Any], refill: Refill) -> None:
        own, saved = vars(self._optimizer), facts["attributes"]
        known = KnownTensors(self._known())
        for key, now, found in list(self._attributes(known)):
            if key in saved:
                continue
            if key not in facts["present"]:
                del own[key]  # made since
            elif not found and key in self._first and now != self._first[key]:
                own[key] = refill.value(own[key], self._first[key])
        for key, structure in saved.items():
            if "generator" in structure:
                own[key].set_state(refill.value(None, {"tensor": structure["generator"]}))
            else:
                own[key] = refill.value(own.get(key), structure)

    def put_back_groups(self, groups: list[dict[str, Any]], refill: Refill) -> None:
        """Hyperparameters of every group that has a parameter the saved ones had."""
        saved = {name: group["settings"] for group in groups for name in group["params"]}
        names = self._known()
        for group in self._optimizer.param_groups:
            known = next((names[id(p)] for p in group["params"] if names[id(p)] in saved), None)
            if known is None:
                continue
            for key, structure in saved[known]["mapping"]:
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
                one.state, one.param_groups = state, groups
        return []

    def _by_name(self) -> dict[str, Tensor]:
        found = {name: p for p, name in self._names()}
        for inner in self._inner.values():
            found = {**inner._by_name(), **found}
        return found


def inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers that this one holds as an attribute, or in a list or dict of them."""
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield key, value
        elif isinstance(value, list | tuple):
            yield from (
                (f"{key}.{i}", item) for i, item in enumerate(value) if isinstance(item, Optimizer)
            )
        elif isinstance(value, dict) and key not in ("state", "defaults"):
            yield from (
                (f"{key}.{k}", item) for k, item in value.items() if isinstance(item, Optimizer)
            )


def every_group(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Parameter groups of an optimizer and of those inside it."""
    waiting, seen = [optimizer], {id(optimizer)}
    while waiting:
        one = waiting.pop()
        yield from one.param_groups
        for _, inner in inner_optimizers(one):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Everything of a group but its parameters and what is no value: functions, dtypes, devices."""
    return {
        key: value for key, value in group.items() if key != "params" and not _of_the_program(value)
    }


def _of_the_program(value: Any) -> bool:
    return callable(value) or isinstance(value, torch.dtype | torch.device)


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """A learning rate that is a tensor keeps its identity: compiled optimizers hold on to it."""
    live = group.get(key)
    if isinstance(live, Tensor) and live is not value:
        live.copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _writes_itself(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is not Optimizer.state_dict


def _holds_tensors(value: Any, parameters: Mapping[int, str], depth: int = 0) -> bool:
    """Tensors that are no parameters, in an object that is no plain value."""
    if isinstance(value, Tensor):
        return id(value) not in parameters and not isinstance(value, nn.Parameter)
    if depth > DEEPEST_LOOK or isinstance(value, nn.Module) or callable(value):
        return False
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    elif hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    return any(_holds_tensors(item, parameters, depth + 1) for item in inside)

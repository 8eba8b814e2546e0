"""Walk the value of a pickle: tensors with name and role, non-finite numbers, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from stepguard.records.verification import Role
from stepguard.verification import limits, roles
from stepguard.verification.damage import ProblemList
from stepguard.verification.pickle_values import (
    ArrayRecord,
    PickledObject,
    StorageRecord,
    TensorRecord,
)

RateKind = Literal["lr", "initial_lr", "max_lr", "base_lr", "last_lr"]
RATES: dict[str, RateKind] = {
    "lr": "lr",
    "initial_lr": "initial_lr",
    "max_lr": "max_lr",
    "base_lrs": "base_lr",
    "_last_lr": "last_lr",
}
"""Keys of optimizer and scheduler states -> what kind of learning rate stands there."""
STEPS = ("global_step", "step", "iteration", "iter", "num_steps", "steps")
UNNAMED = frozenset({"_modules", "_parameters"})
"""Keys of a pickled module that are left out of names. `_buffers` stays: it tells the role."""


@dataclass(frozen=True, slots=True)
class ValuePath:
    """Where a value stands. Linked upward, so that names are built only where they are needed."""

    above: ValuePath | None
    key: Any
    depth: int
    role: Role | None

    def name(self) -> str:
        parts = []
        path = self
        while path.above is not None:
            if path.key is not None and path.key not in UNNAMED:
                parts.append(_word(path.key))
            path = path.above
        return "/".join(reversed(parts))


def _word(key: Any) -> str:
    if isinstance(key, str | int):
        return str(key)
    return type(key).__name__


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """One tensor of a pickle, by name and role."""

    name: str
    role: Role
    record: TensorRecord | ArrayRecord | StorageRecord


@dataclass(slots=True)
class PickleContents:
    """What verification needs to know of a pickle."""

    tensors: list[PickledTensor] = field(default_factory=list)
    numbers: list[tuple[str, Role, float]] = field(default_factory=list)
    """Python floats that are NaN or infinite."""
    rates: list[tuple[str, RateKind, float]] = field(default_factory=list)
    step: int | None = None
    root: Any = None


def walk(root: Any, problems: ProblemList, role: Role | None = None) -> PickleContents:
    """Visit every value, each container once, to a limited depth and number."""
    found = PickleContents(root=root)
    seen: set[int] = set()
    if role is None and isinstance(root, dict):
        role = roles.structural(root)
    # a list instead of recursion: the file decides how deep its containers are
    todo: list[tuple[ValuePath, Any]] = [(ValuePath(None, None, 0, role), root)]
    has_parts = _has_parts(root)
    visited = 0
    while todo:
        path, value = todo.pop()
        visited += 1
        if visited > limits.MOST_NODES or len(found.tensors) > limits.MOST_TENSORS:
            problems.add(
                "limit", f"holds more than {limits.MOST_NODES:,} values; the rest was not read"
            )
            break
        if not isinstance(value, dict | list | tuple | PickledObject):
            _take(found, path, value, has_parts)
        elif id(value) not in seen:
            # a pickle can put a list into itself
            seen.add(id(value))
            todo.extend(_below(path, value, problems))
    found.tensors.reverse()
    return found


def _has_parts(root: Any) -> bool:
    """Tell a checkpoint of several parts from a state dict, whose tensors are all the model's."""
    return isinstance(root, dict) and any(isinstance(value, dict) for value in root.values())


def _below(path: ValuePath, value: Any, problems: ProblemList) -> list[tuple[ValuePath, Any]]:
    if path.depth >= limits.MOST_DEPTH:
        problems.add(
            "limit",
            f"values are nested more than {limits.MOST_DEPTH} deep; the rest was not read",
        )
        return []
    below = []
    for key, child in _children(value):
        if not isinstance(child, str | bytes | None):
            role = path.role or _role_of_part(path, key, child)
            below.append((ValuePath(path, key, path.depth + 1, role), child))
    return below


def _role_of_part(above: ValuePath, key: Any, child: Any) -> Role | None:
    if isinstance(child, dict):
        role = roles.structural(child)
        if role is not None:
            return role
    if _may_name_a_part(above, key, child):
        return roles.named(key)
    return None


def _may_name_a_part(above: ValuePath, key: Any, child: Any) -> bool:
    """Names divide a checkpoint only near the top; further down they are the model's own."""
    if isinstance(child, TensorRecord):
        role = roles.named(key)
        return role == "ema" or (role == "rng" and child.dtype in ("uint8", ""))
    return above.depth == 0 or (above.depth == 1 and isinstance(child, dict | list | PickledObject))


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, PickledObject):
        yield from _children_of_object(value)
    else:
        yield from enumerate(value)


def _children_of_object(value: PickledObject) -> Iterator[tuple[Any, Any]]:
    yield from enumerate(value.arguments)
    for state in value.states():
        if isinstance(state, dict):
            yield from state.items()
        else:
            yield None, state
    yield from enumerate(value.items)
    yield from value.entries.items()


def _take(found: PickleContents, path: ValuePath, value: Any, has_parts: bool) -> None:
    if isinstance(value, TensorRecord | ArrayRecord | StorageRecord):
        _take_tensor(found, path, value, has_parts)
    elif isinstance(value, float):
        _take_number(found, path, value)
    elif type(value) is int:
        _take_step(found, path, value)


def _take_tensor(
    found: PickleContents,
    path: ValuePath,
    record: TensorRecord | ArrayRecord | StorageRecord,
    has_parts: bool,
) -> None:
    name = path.name()
    context = path.role
    if context is None and path.depth == 1 and has_parts:
        context = "other"
    parameter = isinstance(record, TensorRecord) and record.parameter
    role = roles.of_tensor(context, name, record.dtype, parameter=parameter)
    found.tensors.append(PickledTensor(name, role, record))


def _take_step(found: PickleContents, path: ValuePath, value: int) -> None:
    if path.depth == 1 and path.key in STEPS and found.step is None and value >= 0:
        found.step = value


def _take_number(found: PickleContents, path: ValuePath, value: float) -> None:
    if not math.isfinite(value):
        found.numbers.append((path.name(), path.role or "other", value))
        return
    if path.role not in ("optimizer", "scheduler"):
        return
    key = path.key
    # schedulers keep lists of rates: then the name stands above the index
    if not isinstance(key, str) and path.above is not None:
        key = path.above.key
    if isinstance(key, str) and key in RATES:
        found.rates.append((path.name(), RATES[key], value))

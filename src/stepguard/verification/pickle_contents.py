"""Walks what a pickle stream held: every tensor with name and role, numbers that are not finite,
learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from stepguard.records.verification import Role
from stepguard.verification import limits, roles
from stepguard.verification.damage import Notes
from stepguard.verification.pickle_values import ArrayRecord, Made, Storage, TensorRecord

RateKind = Literal["lr", "initial_lr", "max_lr", "base_lr", "last_lr"]
RATES: dict[str, RateKind] = {
    "lr": "lr",
    "initial_lr": "initial_lr",
    "max_lr": "max_lr",
    "base_lrs": "base_lr",
    "_last_lr": "last_lr",
}
STEPS = ("global_step", "step", "iteration", "iter", "num_steps", "steps")
UNNAMED = frozenset({"_modules", "_parameters"})
"""Parts of a pickled module's state that no name needs. `_buffers` stays: it tells the role."""


@dataclass(frozen=True, slots=True)
class Place:
    """A value on the way down, by links upward, so that names are made only where they are needed."""

    above: Place | None
    key: Any
    depth: int
    role: Role | None

    def name(self) -> str:
        parts = []
        place: Place | None = self
        while place is not None:
            if place.above is not None and place.key is not None and place.key not in UNNAMED:
                parts.append(
                    str(place.key) if isinstance(place.key, str | int) else type(place.key).__name__
                )
            place = place.above
        return "/".join(reversed(parts))


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the file."""

    name: str
    role: Role
    record: TensorRecord | ArrayRecord | Storage


@dataclass(slots=True)
class Contents:
    """Everything in a pickle that is worth a look."""

    leaves: list[Leaf] = field(default_factory=list)
    numbers: list[tuple[str, Role, float]] = field(default_factory=list)
    """Python floats that are NaN or infinite."""
    rates: list[tuple[str, RateKind, float]] = field(default_factory=list)
    step: int | None = None
    root: Any = None


def walk(root: Any, notes: Notes, role: Role | None = None) -> Contents:
    """Without recursion, each container once, to a limited depth and number."""
    found = Contents(root=root)
    seen: set[int] = set()
    if role is None and isinstance(root, dict):
        role = roles.structural(root)
    todo: list[tuple[Place, Any]] = [(Place(None, None, 0, role), root)]
    flat = not _nested(root)
    visited = 0
    while todo:
        place, value = todo.pop()
        visited += 1
        if visited > limits.MOST_NODES or len(found.leaves) > limits.MOST_TENSORS:
            notes.add(
                "limit", f"holds more than {limits.MOST_NODES:,} values; the rest was not looked at"
            )
            break
        if isinstance(value, dict | list | tuple | Made):
            if id(value) not in seen:
                seen.add(id(value))
                todo.extend(_below(place, value, notes))
        else:
            _take(found, place, value, flat)
    found.leaves.reverse()
    return found


def _nested(root: Any) -> bool:
    """A checkpoint of several parts, not a bare state dict: then tensors beside the parts belong to
    no model.
    """
    return isinstance(root, dict) and any(isinstance(value, dict) for value in root.values())


def _below(place: Place, value: Any, notes: Notes) -> list[tuple[Place, Any]]:
    if place.depth >= limits.MOST_DEPTH:
        notes.add(
            "limit",
            f"values are nested more than {limits.MOST_DEPTH} deep; the rest was not looked at",
        )
        return []
    return [(_place(place, key, child), child) for key, child in _children(value) if _worth(child)]


def _worth(child: Any) -> bool:
    return not isinstance(child, str | bytes | None)


def _place(above: Place, key: Any, child: Any) -> Place:
    role = above.role
    if role is None:
        role = roles.structural(child) if isinstance(child, dict) else None
        role = role or (roles.named(key) if _may_name_a_part(above, key, child) else None)
    return Place(above, key, above.depth + 1, role)


def _may_name_a_part(above: Place, key: Any, child: Any) -> bool:
    """Only near the top do names divide a checkpoint; further down they are the model's own."""
    if isinstance(child, TensorRecord):
        role = roles.named(key)
        return role == "ema" or (role == "rng" and child.dtype in ("uint8", ""))
    return above.depth == 0 or (above.depth == 1 and isinstance(child, dict | list | Made))


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, Made):
        yield from enumerate(value.arguments)
        for state in value.state if isinstance(value.state, tuple) else (value.state,):
            yield from state.items() if isinstance(state, dict) else ((None, state),)
        yield from enumerate(value.items)
        yield from value.entries.items()
    else:
        yield from enumerate(value)


def _take(found: Contents, place: Place, value: Any, flat: bool) -> None:
    if isinstance(value, TensorRecord | ArrayRecord | Storage):
        name = place.name()
        role = place.role
        if role is None and place.depth == 1 and not flat:
            role = "other"
        parameter = isinstance(value, TensorRecord) and value.parameter
        found.leaves.append(
            Leaf(name, roles.of_tensor(role, name, value.dtype, parameter=parameter), value)
        )
    elif isinstance(value, float):
        _take_number(found, place, value)
    elif (
        type(value) is int
        and place.depth == 1
        and place.key in STEPS
        and found.step is None
        and value >= 0
    ):
        found.step = value


def _take_number(found: Contents, place: Place, value: float) -> None:
    if not math.isfinite(value):
        found.numbers.append((place.name(), place.role or "other", value))
    key = place.key if isinstance(place.key, str) else (place.above.key if place.above else None)
    if (
        isinstance(key, str)
        and key in RATES
        and place.role in ("optimizer", "scheduler")
        and math.isfinite(value)
    ):
        found.rates.append((place.name(), RATES[key], value))

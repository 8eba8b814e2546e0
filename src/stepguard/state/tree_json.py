"""Turn any tree of values into tensors plus JSON, and back: nothing read can execute code.

Named tuples, dataclasses and mappings with attributes come back as look-alikes with the same names.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepguard.state.batch import children, is_record

SCALARS = (str, int, float, bool, type(None))
DEEPEST = 64
"""Containers inside containers; deeper ones are refused, in both directions."""


class NotPlainError(ValueError):
    """A value that is neither a tensor, a container, nor a plain scalar."""


class Attributed(dict[str, Any]):
    """Stands for a mapping whose keys are also attributes, as the batches of tokenizers are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(slots=True)
class KnownTensors:
    """Tensors that have a name already: each is kept once and referred to from then on."""

    parameters: Mapping[int, str] = field(default_factory=dict)
    """Names by the id of the parameter."""
    seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """By id. The tensor itself is held, so that no other tensor gets its id."""


def tree_to_json(
    value: Any,
    tensors: dict[str, Tensor],
    name: str,
    depth: int = 0,
    *,
    known: KnownTensors | None = None,
) -> Any:
    """Return the structure as JSON; put each tensor into `tensors`, under the name it refers to.

    Tensors are not copied. Raises NotPlainError for a value that cannot be kept.
    """
    if depth > DEEPEST:
        raise NotPlainError(f"{name} is nested deeper than {DEEPEST} levels.")
    if isinstance(value, Tensor):
        return _tensor_to_json(value, tensors, name, known)
    if type(value) in SCALARS:
        return {"value": _spelled(value), "kind": type(value).__name__}

    def below(key: object, item: Any) -> Any:
        return tree_to_json(item, tensors, f"{name}/{_shown(key, known)}", depth + 1, known=known)

    if isinstance(value, Mapping):
        items = [[_key(key, name, known), below(key, item)] for key, item in value.items()]
        return {"mapping": items, "attributes": type(value) is not dict}
    if isinstance(value, list | tuple | deque):
        return _sequence_to_json(value, below)
    if is_record(value):
        fields = [[key, below(key, item)] for key, item in children(value)]
        return {"fields": fields, "type": type(value).__name__}
    if hasattr(value, "__array__"):
        array = tree_to_json(torch.as_tensor(value), tensors, name, depth + 1)
        return {"array": array, "number": _is_numpy_number(value)}
    raise NotPlainError(
        f"{name} is a {type(value).__name__}; only tensors, containers and plain values can be "
        f"kept."
    )


def tree_from_json(
    structure: Any, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor] | None = None
) -> Any:
    """Invert `tree_to_json`; ValueError, TypeError or KeyError for what that never writes.

    `parameters`: the live ones by name, for what refers to them.
    """
    if "tensor" in structure:
        return _tensor(structure, tensors)
    if "parameter" in structure:
        return (parameters or {})[structure["parameter"]]
    if "value" in structure:
        return _scalar(structure)
    if "array" in structure:
        array = tree_from_json(structure["array"], tensors).numpy()
        return array[()] if structure.get("number") else array
    if "named" in structure or "fields" in structure:
        return _record(structure, tensors)
    if "mapping" in structure:
        return _mapping(structure, tensors, parameters)
    return _sequence(structure, lambda item: tree_from_json(item, tensors, parameters))


def _is_numpy_number(value: Any) -> bool:
    """A number of numpy is an array without a length."""
    return type(value).__module__ == "numpy" and not hasattr(value, "__len__")


def _mapping(
    structure: dict[str, Any],
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor] | None,
) -> dict[Any, Any]:
    items: dict[Any, Any] = {}
    for key, item in structure["mapping"]:
        items[key_from_json(key, parameters)] = tree_from_json(item, tensors, parameters)
    return Attributed(items) if structure.get("attributes") else items


def _scalar(structure: dict[str, Any]) -> Any:
    value = structure["value"]
    if structure.get("kind") != "float":
        return value
    number = float(value)
    # The one NaN object of the module: containers compare it by identity.
    return math.nan if math.isnan(number) else number


def _record(structure: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Build a look-alike of a named tuple or a dataclass: the class itself is not in the file."""
    named = structure.get("named")
    fields = structure["fields"] if named is None else named
    names = [str(name) for name, _ in fields]
    for name in names:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"{name!r} is not a name of a field")
    values = [tree_from_json(value, tensors) for _, value in fields]
    if named is None:
        return dataclasses.make_dataclass("Batch", names)(*values)
    return namedtuple("Batch", names)(*values)


def _sequence_to_json(value: Any, below: Callable[[object, Any], Any]) -> dict[str, Any]:
    if hasattr(value, "_fields"):
        named = [[field, below(field, getattr(value, field))] for field in value._fields]
        return {"named": named, "type": type(value).__name__}
    items = [below(index, item) for index, item in enumerate(value)]
    if isinstance(value, deque):
        return {"deque": items, "most": value.maxlen}
    if isinstance(value, list):
        return {"list": items}
    return {"tuple": items}


def _sequence(structure: dict[str, Any], below: Callable[[Any], Any]) -> Any:
    if "deque" in structure:
        return deque((below(item) for item in structure["deque"]), maxlen=structure["most"])
    if "tuple" in structure:
        return tuple(below(item) for item in structure["tuple"])
    return [below(item) for item in structure["list"]]


def _tensor_to_json(
    value: Tensor, tensors: dict[str, Tensor], name: str, known: KnownTensors | None
) -> Any:
    if known is not None:
        if id(value) in known.parameters:
            return {"parameter": known.parameters[id(value)]}
        _, name = known.seen.setdefault(id(value), (value, name))
    tensors[name] = value.detach()
    return {"tensor": name, "requires_grad": value.requires_grad, "device": value.device.type}


def _tensor(structure: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[structure["tensor"]].clone()
    if structure.get("device", "cpu") != "cpu" and torch.accelerator.is_available():
        tensor = tensor.to(torch.accelerator.current_accelerator())
    return tensor.requires_grad_(bool(structure.get("requires_grad")))


def _key(key: Any, name: str, known: KnownTensors | None) -> Any:
    if isinstance(key, str):
        return key
    if type(key) in SCALARS:
        return {"value": _spelled(key), "kind": type(key).__name__}
    if isinstance(key, Tensor) and known is not None and id(key) in known.parameters:
        return {"parameter": known.parameters[id(key)]}
    raise NotPlainError(
        f"{name} has a {type(key).__name__} as a key; only plain values can be kept."
    )


def _shown(key: Any, known: KnownTensors | None) -> Any:
    """Return a key as part of a name."""
    if not isinstance(key, Tensor):
        return key
    if known is None:
        return "tensor"
    return known.parameters.get(id(key), "tensor")


def key_from_json(key: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
    """Return the key of a mapping from what `tree_to_json` wrote for it."""
    if isinstance(key, str):
        return key
    return tree_from_json(key, {}, parameters)


def _spelled(value: Any) -> Any:
    # JSON has neither NaN nor Inf, and repr keeps every bit of a float.
    if isinstance(value, float):
        return repr(value)
    return value

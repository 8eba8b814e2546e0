"""Any batch as tensors plus JSON, and back: nothing that is read can execute code.

Named tuples, dataclasses and mappings with attributes come back as look-alikes with the same names,
built here.
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
class Known:
    """Tensors that have a name already: parameters are referred to, and what is met twice is kept
    once.
    """

    parameters: Mapping[int, str] = field(default_factory=dict)
    """Names by the id of the parameter."""
    seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """By id. The tensor itself is held, so that no other one gets its id meanwhile."""


def take_apart(
    value: Any, tensors: dict[str, Tensor], name: str, depth: int = 0, *, known: Known | None = None
) -> Any:
    """The structure as JSON; each tensor goes into `tensors`, not copied, under a name the
    structure refers to.
    """
    if depth > DEEPEST:
        raise NotPlainError(f"{name} is nested deeper than {DEEPEST} levels.")
    if isinstance(value, Tensor):
        return _tensor_apart(value, tensors, name, known)
    if type(value) in SCALARS:
        return {"value": _spelled(value), "kind": type(value).__name__}

    def below(key: object, item: Any) -> Any:
        return take_apart(item, tensors, f"{name}/{_shown(key, known)}", depth + 1, known=known)

    if isinstance(value, Mapping):
        items = [[_key(k, name, known), below(k, v)] for k, v in value.items()]
        return {"mapping": items, "attributes": type(value) is not dict}
    if isinstance(value, list | tuple | deque):
        return _sequence_apart(value, below)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            [f.name, below(f.name, getattr(value, f.name))] for f in dataclasses.fields(value)
        ]
        return {"fields": fields, "type": type(value).__name__}
    if hasattr(value, "__array__"):
        array = take_apart(torch.as_tensor(value), tensors, name, depth + 1)
        return {
            "array": array,
            "number": type(value).__module__ == "numpy" and not hasattr(value, "__len__"),
        }
    raise NotPlainError(
        f"{name} is a {type(value).__name__}; only tensors, containers and plain values can be "
        f"kept."
    )


def put_together(
    structure: Any, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor] | None = None
) -> Any:
    """The inverse of `take_apart`; raises ValueError, TypeError or KeyError for what `take_apart`
    never writes.

    `parameters`: the live ones by name, for what refers to them.
    """

    def below(item: Any) -> Any:
        return put_together(item, tensors, parameters)

    if "tensor" in structure:
        return _tensor(structure, tensors)
    if "parameter" in structure:
        return (parameters or {})[structure["parameter"]]
    if "mapping" in structure:
        items = {key_back(key, parameters): below(value) for key, value in structure["mapping"]}
        return Attributed(items) if structure.get("attributes") else items
    if "array" in structure:
        array = below(structure["array"]).numpy()
        return array[()] if structure.get("number") else array
    if "named" in structure:
        names, values = _fields(structure["named"], tensors)
        return namedtuple("Batch", names)(*values)
    if "fields" in structure:
        names, values = _fields(structure["fields"], tensors)
        return dataclasses.make_dataclass("Batch", names)(*values)
    if "value" not in structure:
        return _sequence(structure, below)
    return _number(structure["value"]) if structure.get("kind") == "float" else structure["value"]


def _sequence_apart(value: Any, below: Callable[[object, Any], Any]) -> dict[str, Any]:
    if hasattr(value, "_fields"):
        return {
            "named": [[f, below(f, getattr(value, f))] for f in value._fields],
            "type": type(value).__name__,
        }
    items = [below(index, item) for index, item in enumerate(value)]
    if isinstance(value, deque):
        return {"deque": items, "most": value.maxlen}
    return {"list": items} if isinstance(value, list) else {"tuple": items}


def _sequence(structure: dict[str, Any], below: Callable[[Any], Any]) -> Any:
    if "deque" in structure:
        return deque((below(item) for item in structure["deque"]), maxlen=structure["most"])
    if "tuple" in structure:
        return tuple(below(item) for item in structure["tuple"])
    return [below(item) for item in structure["list"]]


def _tensor_apart(value: Tensor, tensors: dict[str, Tensor], name: str, known: Known | None) -> Any:
    if known is not None:
        if id(value) in known.parameters:
            return {"parameter": known.parameters[id(value)]}
        _, name = known.seen.setdefault(id(value), (value, name))
    tensors[name] = value.detach()
    return {"tensor": name, "requires_grad": value.requires_grad, "device": value.device.type}


def _tensor(structure: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[structure["tensor"]].clone()
    if structure.get("device", "cpu") != "cpu" and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        tensor = tensor.to(accelerator) if accelerator is not None else tensor
    return tensor.requires_grad_(bool(structure.get("requires_grad")))


def _fields(items: list[Any], tensors: Mapping[str, Tensor]) -> tuple[list[str], list[Any]]:
    names = [str(name) for name, _ in items]
    wrong = [name for name in names if not name.isidentifier() or name.startswith("_")]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no name of a field")
    return names, [put_together(value, tensors) for _, value in items]


def _key(key: Any, name: str, known: Known | None) -> Any:
    if isinstance(key, str):
        return key
    if type(key) in SCALARS:
        return {"value": _spelled(key), "kind": type(key).__name__}
    if isinstance(key, Tensor) and known is not None and id(key) in known.parameters:
        return {"parameter": known.parameters[id(key)]}
    raise NotPlainError(
        f"{name} has a {type(key).__name__} as a key; only plain values can be kept."
    )


def _shown(key: Any, known: Known | None) -> Any:
    """A key as part of a name."""
    if isinstance(key, Tensor):
        return known.parameters.get(id(key), "tensor") if known is not None else "tensor"
    return key


def key_back(key: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
    """The key of a mapping from what `take_apart` wrote for it."""
    return key if isinstance(key, str) else put_together(key, {}, parameters)


def _spelled(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else value


def _number(text: Any) -> float:
    value = float(text)
    return math.nan if math.isnan(value) else value

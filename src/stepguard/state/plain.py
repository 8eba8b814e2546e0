"""Any batch as tensors plus JSON, and back: nothing that is read can execute code.

Named tuples, dataclasses and mappings with attributes come back as look-alikes with the same names, built here.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from collections.abc import Mapping
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


def take_apart(value: Any, tensors: dict[str, Tensor], name: str, depth: int = 0) -> Any:
    """The structure as JSON; each tensor goes into `tensors`, not copied, under a name the structure refers to."""
    if depth > DEEPEST:
        raise NotPlainError(f"{name} is nested deeper than {DEEPEST} levels.")
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name, "requires_grad": value.requires_grad, "device": value.device.type}
    if type(value) in SCALARS:
        return {"value": _spelled(value), "kind": type(value).__name__}

    def below(key: object, item: Any) -> Any:
        return take_apart(item, tensors, f"{name}/{key}", depth + 1)

    if isinstance(value, Mapping):
        items = [[_key(k, name), below(k, v)] for k, v in value.items()]
        return {"mapping": items, "attributes": type(value) is not dict}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": [[f, below(f, getattr(value, f))] for f in value._fields], "type": type(value).__name__}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [below(i, v) for i, v in enumerate(value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[f.name, below(f.name, getattr(value, f.name))] for f in dataclasses.fields(value)]
        return {"fields": fields, "type": type(value).__name__}
    if hasattr(value, "__array__"):
        return {"array": take_apart(torch.as_tensor(value), tensors, name)}
    raise NotPlainError(f"{name} is a {type(value).__name__}; only tensors, containers and plain values can be kept.")


def put_together(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `take_apart`; raises ValueError, TypeError or KeyError for what `take_apart` never writes."""
    if "tensor" in structure:
        return _tensor(structure, tensors)
    if "mapping" in structure:
        items = {_key_back(key): put_together(value, tensors) for key, value in structure["mapping"]}
        return Attributed(items) if structure.get("attributes") else items
    if "list" in structure:
        return [put_together(value, tensors) for value in structure["list"]]
    if "tuple" in structure:
        return tuple(put_together(value, tensors) for value in structure["tuple"])
    if "array" in structure:
        return put_together(structure["array"], tensors).numpy()
    if "named" in structure:
        names, values = _fields(structure["named"], tensors)
        return namedtuple("Batch", names)(*values)
    if "fields" in structure:
        names, values = _fields(structure["fields"], tensors)
        return dataclasses.make_dataclass("Batch", names)(*values)
    return _number(structure["value"]) if structure.get("kind") == "float" else structure["value"]


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


def _key(key: Any, name: str) -> Any:
    if isinstance(key, str):
        return key
    if type(key) in SCALARS:
        return {"value": _spelled(key), "kind": type(key).__name__}
    raise NotPlainError(f"{name} has a {type(key).__name__} as a key; only plain values can be kept.")


def _key_back(key: Any) -> Any:
    return key if isinstance(key, str) else put_together(key, {})


def _spelled(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else value


def _number(text: Any) -> float:
    value = float(text)
    return math.nan if math.isnan(value) else value

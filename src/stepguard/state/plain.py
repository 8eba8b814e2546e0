"""Any batch as tensors plus JSON, and back: nothing that is read can execute code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALARS = (str, int, float, bool, type(None))


class NotPlainError(ValueError):
    """A value that is neither a tensor, a container, nor a plain scalar."""


def take_apart(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """The structure as JSON; each tensor goes into `tensors` under a name the structure refers to."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name, "requires_grad": value.requires_grad}
    if isinstance(value, SCALARS):
        return {"value": repr(value) if isinstance(value, float) else value, "kind": type(value).__name__}
    if isinstance(value, Mapping):
        items = [[str(k), take_apart(v, tensors, f"{name}/{k}")] for k, v in value.items()]
        return {"mapping": items}
    if isinstance(value, list | tuple):
        items = [take_apart(v, tensors, f"{name}/{i}") for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    array = getattr(value, "__array__", None)
    if array is not None:
        return take_apart(torch.as_tensor(value), tensors, name)
    raise NotPlainError(f"{name} is a {type(value).__name__}; only tensors, containers and plain values can be kept.")


def put_together(structure: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `take_apart`. Mappings come back as dict."""
    if "tensor" in structure:
        return tensors[structure["tensor"]].clone().requires_grad_(bool(structure.get("requires_grad")))
    if "mapping" in structure:
        return {key: put_together(value, tensors) for key, value in structure["mapping"]}
    if "list" in structure:
        return [put_together(value, tensors) for value in structure["list"]]
    if "tuple" in structure:
        return tuple(put_together(value, tensors) for value in structure["tuple"])
    value = structure["value"]
    return float(value) if structure.get("kind") == "float" else value

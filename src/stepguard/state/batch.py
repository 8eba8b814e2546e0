"""Tensors of a batch by name, whatever containers it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from stepguard.tensors.values import is_finite

OUTPUT_GRADIENT = "output gradient"
"""Key beside the arguments of a recorded model call: what came back to the outputs. It is no part
of the batch.
"""


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(`x`, tensor) for mappings, (`0`, tensor) for sequences, dotted where nested; "" for a lone
    tensor.
    """
    if isinstance(batch, Tensor):
        yield name, batch
        return
    for key, value in _children(batch):
        yield from named_tensors(value, f"{name}.{key}" if name else key)


def tensor_label(name: str) -> str:
    """`batch:x`, or `batch` for a batch that is one tensor."""
    return f"batch:{name}" if name else "batch"


def bad_batch_tensors(batches: tuple[Any, ...]) -> list[str]:
    """`batch:KEY` of every floating-point tensor with a non-finite element, each named once."""
    labels: dict[str, None] = {}
    for batch in batches:
        for name, tensor in named_tensors(batch):
            if not is_finite(tensor):
                labels[tensor_label(name)] = None
    return list(labels)


def _children(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from ((str(k), v) for k, v in batch.items() if k != OUTPUT_GRADIENT)
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        yield from zip(batch._fields, batch, strict=True)
    elif isinstance(batch, list | tuple):
        yield from ((str(i), v) for i, v in enumerate(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((f.name, getattr(batch, f.name)) for f in fields(batch))
    elif hasattr(batch, "data") and isinstance(getattr(batch, "data", None), Mapping):
        yield from ((str(k), v) for k, v in batch.data.items())

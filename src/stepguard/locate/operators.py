"""What the trace must know about an operator: argument names, what it writes, whether it works
element by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

POINTWISE = frozenset(
    "aten." + name
    for name in (
        "where",
        "masked_fill",
        "masked_fill_",
        "_to_copy",
        "copy_",
        "nan_to_num",
        "dropout",
    )
)
"""Element-by-element operators some of whose overloads lack the tag."""
MASKED = frozenset(
    "aten." + name
    for name in ("where", "masked_fill", "masked_fill_", "masked_select", "masked_scatter")
)
INDEXED = frozenset(
    "aten." + name for name in ("index", "index_put", "index_put_", "_unsafe_index")
)
WRITES_CONSTANTS = frozenset(
    "aten." + name
    for name in (
        *(
            "where",
            "masked_fill",
            "masked_fill_",
            "fill",
            "fill_",
            "full",
            "full_like",
            "new_full",
            "scalar_tensor",
        ),
        *(
            "clamp",
            "clamp_",
            "clamp_min",
            "clamp_max",
            "clamp_min_",
            "clamp_max_",
            "hardtanh",
            "nan_to_num",
        ),
        *(
            "constant_pad_nd",
            "arange",
            "index_fill",
            "index_fill_",
            "linspace",
            "threshold",
            "_cdist_forward",
        ),
        *(
            "norm",
            "linalg_vector_norm",
            "_foreach_norm",
            "linalg_matrix_norm",
            "scatter",
            "scatter_",
            "histc",
        ),
    )
)
"""Operators for which an infinite number is an ordinary argument: a mask, an open bound, the order
of a norm.
"""
BLANK = frozenset(
    "aten." + name
    for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
)
OVERWRITES = frozenset(
    "aten." + name
    for name in (
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "set_",
    )
)
"""In-place operators that do not read what they replace."""
TESTS = frozenset(
    "aten." + name for name in ("isnan", "isinf", "isfinite", "_local_scalar_dense", "equal")
)
"""They only look; their answer is never a bad value."""


class Entry(NamedTuple):
    """One tensor or number handed to an operator, under its name in the schema."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Operator:
    """Facts of one overload that do not change from call to call."""

    name: str
    namespace: str
    arguments: tuple[str, ...]
    writes: frozenset[str]
    views: bool
    """Returns memory of an argument without writing it."""
    pointwise: bool

    @property
    def base(self) -> str:
        """`div` for `aten.div_` and `aten._foreach_div_`, so that a fact is written once for all."""
        return self.name.partition(".")[2].removeprefix("_foreach_").rstrip("_")

    @property
    def many(self) -> bool:
        """Does the same to every tensor of its lists, one by one?"""
        return self.name.startswith("aten._foreach_")

    def entries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Entry]:
        """Tensors and floats that go in, lists taken apart."""
        named = [*zip(self.arguments, args, strict=False), *kwargs.items()]
        found: list[Entry] = []
        for name, value in named:
            _collect(name, value, found)
        return found

    def reads(self, name: str) -> bool:
        """Does the operator look at what this argument held before?"""
        root = name.partition("[")[0]
        if self.name.endswith("_like") or self.name.startswith("aten.new_"):
            return False  # only the shape is of interest
        return root not in self.writes or not (self.name in OVERWRITES or root == "out")

    def odd_number(self, numbers: list[tuple[str, float]]) -> tuple[str, float] | None:
        """A number that makes the result bad by itself: any NaN, or an infinity where one computes
        with it.
        """
        for name, value in numbers:
            if math.isnan(value) or (math.isinf(value) and self.name not in WRITES_CONSTANTS):
                return name, value
        return None

    def selects(self, entries: list[Entry]) -> bool:
        """Does it choose elements by a condition?"""
        if self.name in MASKED:
            return True
        return self.name in INDEXED and any(
            isinstance(e.value, Tensor) and e.value.dtype is torch.bool
            for e in entries
            if e.name.startswith("indices")
        )


def _collect(name: str, value: Any, found: list[Entry]) -> None:
    if isinstance(value, Tensor) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    ):
        found.append(Entry(name, value))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            if isinstance(item, Tensor | list | tuple | float):
                _collect(f"{name}[{position}]", item, found)


@cache
def describe(func: Any) -> Operator:
    """The operator behind what a dispatch mode is handed."""
    schema = func._schema
    name = str(func._overloadpacket)
    writes = frozenset(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    aliased = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return Operator(
        name=name,
        namespace=func.namespace,
        arguments=tuple(a.name for a in schema.arguments),
        writes=writes,
        views=bool(aliased) and not writes,
        pointwise=torch.Tag.pointwise in func.tags or name in POINTWISE,
    )

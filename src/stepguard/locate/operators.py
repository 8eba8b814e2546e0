"""Facts on one operator: argument names, what it writes, whether it works element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepguard.locate.calls import aten

POINTWISE = aten("where masked_fill masked_fill_ _to_copy copy_ nan_to_num dropout")
"""Element-by-element operators some of whose overloads lack torch's pointwise tag."""
MASKED = aten("where masked_fill masked_fill_ masked_select masked_scatter")
INDEXED = aten("index index_put index_put_ _unsafe_index")
TAKES_INFINITY = (
    aten("where masked_fill masked_fill_ index_fill index_fill_ scatter scatter_ constant_pad_nd")
    | aten("fill fill_ full full_like new_full scalar_tensor arange linspace")
    | aten("clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ hardtanh threshold nan_to_num")
    | aten("norm linalg_vector_norm linalg_matrix_norm _foreach_norm _cdist_forward histc")
)
"""Operators with infinity as an ordinary argument: a mask, an open bound, the order of a norm."""
UNINITIALISED = aten("empty new_empty empty_like empty_strided new_empty_strided")
"""Operators that give memory without writing it."""
TORCHS_OWN = ("aten", "prim", "prims", "profiler", "inductor", "quantized", "_c10d_functional")
OVERWRITES = aten("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ set_")
"""In-place operators that do not read what they replace."""
TESTS = aten("isnan isinf isfinite _local_scalar_dense equal")
"""Operators whose answer is never a bad value."""


class OperatorEntry(NamedTuple):
    """One tensor or number handed to an operator, under its name in the schema."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Operator:
    """Facts of one overload that do not change from call to call."""

    name: str
    namespace: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    """Arguments that it writes in place."""
    views: bool
    """Returns memory of an argument without writing it."""
    pointwise: bool

    @property
    def custom(self) -> bool:
        """True for an operator from outside torch, registered by `torch.library` for instance."""
        return self.namespace not in TORCHS_OWN

    @property
    def base(self) -> str:
        """`div` for `aten.div_` and `aten._foreach_div_`, so that facts are kept once for all."""
        return self.name.partition(".")[2].removeprefix("_foreach_").rstrip("_")

    @property
    def foreach(self) -> bool:
        """True if it does the same to every tensor of its lists, one by one."""
        return self.name.startswith("aten._foreach_")

    def entries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[OperatorEntry]:
        """List the tensors and numbers that go in, lists taken apart."""
        found: list[OperatorEntry] = []
        for name, value in zip(self.arguments, args, strict=False):
            _collect(name, value, found)
        for name, value in kwargs.items():
            _collect(name, value, found)
        return found

    def writes(self, name: str) -> bool:
        """True if this argument, or the list it stands in, is written in place."""
        return _root(name) in self.written

    def reads(self, name: str) -> bool:
        """True if the result depends on what this argument held before."""
        # zeros_like and new_zeros take the shape only.
        if self.name.endswith("_like") or self.name.startswith("aten.new_"):
            return False
        if not self.writes(name):
            return True
        return self.name not in OVERWRITES and _root(name) != "out"

    def bad_number(self, numbers: list[tuple[str, float]]) -> tuple[str, float] | None:
        """Find a NaN among the numbers, or an infinity where the operator computes with it."""
        for name, value in numbers:
            if math.isnan(value):
                return name, value
            if math.isinf(value) and self.name not in TAKES_INFINITY:
                return name, value
        return None

    def selects(self, entries: list[OperatorEntry]) -> bool:
        """True if it chooses elements by a condition; indexing by positions does not."""
        if self.name in MASKED:
            return True
        if self.name not in INDEXED:
            return False
        indices = [entry.value for entry in entries if _root(entry.name) == "indices"]
        return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)


def _root(name: str) -> str:
    """`tensors` for `tensors[3]`, an entry of an argument that is a list."""
    return name.partition("[")[0]


def _collect(name: str, value: Any, found: list[OperatorEntry]) -> None:
    if isinstance(value, Tensor) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    ):
        found.append(OperatorEntry(name, value))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            # Lists of integers are shapes and axes.
            if isinstance(item, Tensor | list | tuple | float):
                _collect(f"{name}[{position}]", item, found)


@cache
def describe(func: Any) -> Operator:
    """Describe the overload that a dispatch mode is handed."""
    schema = func._schema
    name = str(func._overloadpacket)
    arguments = []
    written = set()
    for argument in schema.arguments:
        arguments.append(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(argument.name)
    aliased = any(returned.alias_info is not None for returned in schema.returns)
    return Operator(
        name=name,
        namespace=func.namespace,
        arguments=tuple(arguments),
        written=frozenset(written),
        views=aliased and not written,
        pointwise=torch.Tag.pointwise in func.tags or name in POINTWISE,
    )

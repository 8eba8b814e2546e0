"""One operation that has just made a bad value, with the arguments it had."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stepguard.locate.attribution import Read
from stepguard.locate.calls import Call
from stepguard.locate.operands import Index, broadcast_index, element, first_broken, first_true
from stepguard.locate.operators import Operator


@dataclass(slots=True)
class Invocation:
    """One operation with its arguments, as they were before it ran."""

    operator: Operator
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: list[Read]
    numbers: list[tuple[str, float]]
    selects: bool = False
    """Chooses elements by a condition."""

    @property
    def used(self) -> list[Read]:
        """Tensors whose values the result depends on."""
        return [read for read in self.reads if self.operator.reads(read.name)]

    def only(self, position: int) -> Invocation:
        """Return what a foreach operation did at one position of its lists, by plain names."""
        mark = f"[{position}]"
        reads = []
        for read in self.reads:
            if _belongs(read.name, mark):
                reads.append(replace(read, name=read.name.removesuffix(mark)))
        numbers = []
        for name, value in self.numbers:
            if _belongs(name, mark):
                numbers.append((name.removesuffix(mark), value))
        args = tuple(_one(value, position) for value in self.args)
        kwargs = {name: _one(value, position) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, reads=reads, numbers=numbers)


def _belongs(name: str, mark: str) -> bool:
    return name.endswith(mark) or "[" not in name


def _one(value: Any, position: int) -> Any:
    # The operator still takes lists: one of one entry gives the same result for that entry.
    if isinstance(value, list | tuple) and position < len(value):
        return [value[position]]
    return value


@dataclass(slots=True)
class BadOp:
    """One operation that has just made a bad value, with the arguments it had."""

    call: Call
    invocation: Invocation
    out: Tensor
    where: Tensor | None
    """True at the elements that no input explains, where that is known."""

    @property
    def operator(self) -> Operator:
        return self.invocation.operator

    @property
    def reads(self) -> list[Read]:
        return self.invocation.reads

    @property
    def numbers(self) -> list[tuple[str, float]]:
        return self.invocation.numbers

    @property
    def index(self) -> Index | None:
        """The first bad element that no input explains."""
        if self.where is not None:
            return first_true(self.where)
        return first_broken(self.out)

    def read(self, name: str) -> Read | None:
        """Return the tensor that was given for this argument."""
        for read in self.reads:
            if read.name == name:
                return read
        return None

    def at(self, name: str) -> float | None:
        """Return the element of this argument that met the bad position, or the number itself."""
        read = self.read(name)
        if read is None:
            return dict(self.numbers).get(name)
        index = self.index
        if index is None:
            return None
        return element(read.tensor, broadcast_index(index, tuple(read.tensor.shape)))

"""One operation that just made a bad value, with everything it saw."""

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

    def only(self, position: int) -> Invocation:
        """What a foreach operation did at one position of its lists; operands go by their plain
        names.
        """
        mark = f"[{position}]"
        reads = [
            replace(r, name=r.name.removesuffix(mark)) for r in self.reads if _belongs(r.name, mark)
        ]
        numbers = [
            (name.removesuffix(mark), value) for name, value in self.numbers if _belongs(name, mark)
        ]
        args = tuple(_one(value, position) for value in self.args)
        kwargs = {name: _one(value, position) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, reads=reads, numbers=numbers)


def _belongs(name: str, mark: str) -> bool:
    return name.endswith(mark) or "[" not in name


def _one(value: Any, position: int) -> Any:
    return [value[position]] if isinstance(value, list | tuple) and position < len(value) else value


@dataclass(slots=True)
class Birth:
    """One operation that just made a bad value, with everything it saw."""

    call: Call
    made_by: Invocation
    out: Tensor
    where: Tensor | None
    """True at the elements that were born bad, where that is known."""

    @property
    def operator(self) -> Operator:
        return self.made_by.operator

    @property
    def reads(self) -> list[Read]:
        return self.made_by.reads

    @property
    def numbers(self) -> list[tuple[str, float]]:
        return self.made_by.numbers

    @property
    def index(self) -> Index | None:
        """The first element that was born bad."""
        return first_true(self.where) if self.where is not None else first_broken(self.out)

    def read(self, name: str) -> Read | None:
        return next((r for r in self.reads if r.name == name), None)

    def at(self, name: str) -> float | None:
        """The element of this argument that met the bad position, or the number itself."""
        read = self.read(name)
        if read is None:
            return next((value for key, value in self.numbers if key == name), None)
        index = self.index
        spot = broadcast_index(index, tuple(read.tensor.shape)) if index is not None else None
        return element(read.tensor, spot)

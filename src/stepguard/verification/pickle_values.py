"""What a pickle stream becomes here: plain containers, and records of what it would have built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stepguard.verification import dtype_names, limits

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""Shared by all objects without entries: a file may hold millions of them."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something importable. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object that pickle would have built: class, arguments, state and items, none of it run."""

    what: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: Any = ()
    entries: Any = field(default_factory=lambda: NOTHING)

    def states(self) -> tuple[Any, ...]:
        """Return the parts of the state: a class with slots pickles `(dict, slots)`."""
        if isinstance(self.state, tuple):
            return self.state
        return (self.state,)

    def field(self, name: str) -> Any:
        """Return a field of the state; None if it has no such field."""
        for state in self.states():
            if isinstance(state, dict) and name in state:
                return state[name]
        return None


@dataclass(slots=True, eq=False)
class PickledBytes:
    """A byte string of the stream by its offset in the file; short ones are kept in memory too."""

    start: int
    """In the file, not in the slice; -1 for bytes that do not lie in the file as they are."""
    size: int
    data: bytes | None = None


class PickledSet(list[Any]):
    """The members of a set as a list: they may be values that cannot be hashed."""


@dataclass(slots=True, eq=False)
class StorageRecord:
    """Memory that tensors are views of."""

    key: str
    dtype: str
    elements: int
    nested: PickledBytes | None = None
    """The bytes of the storage, where it is itself a torch.save inside a plain pickle."""


@dataclass(slots=True, eq=False)
class TensorRecord:
    """A tensor as a view of a storage."""

    storage: StorageRecord
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool = False


@dataclass(slots=True, eq=False)
class ArrayRecord:
    """A numpy array whose bytes stand in the stream."""

    raw: PickledBytes | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def set_state(self, state: Any) -> None:
        """Take `(version, shape, dtype, is_fortran, bytes)`, as numpy's `__setstate__` does."""
        if not (isinstance(state, tuple) and len(state) == 5):
            return
        _, shape, dtype, _, raw = state
        if not isinstance(dtype, NumpyType) or not isinstance(raw, PickledBytes):
            return
        if limits.is_shape(shape) and min(shape, default=0) >= 0:
            self.raw = raw
            self.shape = tuple(shape)
            self.dtype = dtype.torch_name


@dataclass(slots=True, eq=False)
class NumpyType:
    """A numpy dtype: its letter code and byte order."""

    code: str
    order: str = "<"

    @property
    def torch_name(self) -> str:
        """Return torch's name; empty if torch has no such type or the bytes are big-endian."""
        if self.order == ">" and not self.code.endswith("1"):
            return ""
        return dtype_names.NUMPY.get(self.code, "")

    def set_state(self, state: Any) -> None:
        """Take the byte order from `(version, byte order, ...)`."""
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

"""What a pickle stream becomes here: plain containers, and records of what it would have built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stepguard.verification import dtype_names, limits
from stepguard.verification.damage import Damaged

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
    is_filled: bool = False
    """It has its bytes: numpy frees them for another state, and a tensor may still use them."""

    def set_state(self, state: Any) -> None:
        """Take `(version, shape, dtype, is_fortran, bytes)`, as numpy's `__setstate__` does."""
        _, shape, dtype, _, raw = state
        # the elements of an array of objects stand in a list
        is_held = isinstance(dtype, NumpyType) and (
            isinstance(raw, list) if dtype.is_object else isinstance(raw, PickledBytes | str)
        )
        is_sized = limits.is_shape(shape) and min(shape, default=0) >= 0
        if self.is_filled or not is_held or not is_sized:
            raise ValueError("a state that numpy does not write for an array")
        self.is_filled = True
        if isinstance(raw, PickledBytes):
            self.raw = raw
            self.shape = tuple(shape)
            self.dtype = dtype.torch_name


@dataclass(slots=True, eq=False)
class NumpyType:
    """A numpy dtype: its letter code and byte order."""

    code: str
    order: str = "<"
    is_copy: bool = False
    """Made for this pickle; numpy hands out the same object for a type everywhere else."""

    @property
    def is_object(self) -> bool:
        return self.code.startswith("O")

    @property
    def torch_name(self) -> str:
        """Return torch's name; empty if torch has no such type or the bytes are big-endian."""
        if self.order == ">" and not self.code.endswith("1"):
            return ""
        return dtype_names.NUMPY.get(self.code, "")

    def set_state(self, state: Any) -> None:
        """Take the byte order from `(version, order, subtype, names, fields, size, alignment,
        flags[, metadata])`.

        numpy believes all of it. Flags that deny an object turn bytes into pointers, and so does
        a field that lies outside of its element.
        """
        version, order, subtype, names, fields, size, _, flags, *metadata = state
        if subtype is not None or names is not None or fields is not None:
            raise Damaged(
                "format",
                "a structured NumPy type is not read, for NumPy believes the offsets of its "
                "fields; save its columns as arrays of their own",
            )
        letter = self.code[:1]
        width = int(self.code[1:] or 0) if letter in "SUV" else -1
        expected = (width * 4 if letter == "U" else width, {"O": 63, "U": 8}.get(letter, 0))
        dated = letter in "mM" and version == 4 and len(metadata) == 1
        if (
            not self.is_copy
            or (size, flags) != expected
            or order not in ("<", ">", "|", "=")
            or not (dated or (version == 3 and not metadata))
        ):
            raise ValueError(f"a state that numpy does not write for the type {self.code[:20]}")
        self.order = order

"""What a pickle stream turns into here: plain containers, and records of what it would have built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepguard.verification import dtype_names


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something importable. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What would be an object of some class: arguments, state and items as they stood in the
    stream.
    """

    what: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    def field(self, name: str) -> Any:
        """A field of the state, also of a class with slots."""
        for state in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(state, dict) and name in state:
                return state[name]
        return None


@dataclass(slots=True, eq=False)
class Raw:
    """A byte string of the stream by its place in the file; short ones are kept as well."""

    start: int
    """In the file, not in the window."""
    size: int
    data: bytes | None = None


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that tensors are views of."""

    key: str
    dtype: str
    elements: int
    nested: Raw | None = None
    """Where the storage is a byte string of the stream itself: a torch.save inside a plain pickle.
    """


@dataclass(slots=True, eq=False)
class TensorRecord:
    """A tensor as a view of a storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool = False


@dataclass(slots=True, eq=False)
class ArrayRecord:
    """A numpy array whose bytes stand in the stream."""

    raw: Raw | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def take_state(self, state: Any) -> None:
        """`(version, shape, dtype, is_fortran, bytes)`, as numpy's `__setstate__` takes it."""
        if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], NumpyType)):
            return
        _, shape, dtype, _, raw = state
        if (
            isinstance(raw, Raw)
            and isinstance(shape, tuple)
            and all(type(n) is int and n >= 0 for n in shape)
        ):
            self.raw, self.shape, self.dtype = raw, shape, dtype.torch_name


@dataclass(slots=True, eq=False)
class NumpyType:
    """A numpy dtype: its letter code and byte order."""

    code: str
    order: str = "<"

    @property
    def torch_name(self) -> str:
        """Empty for what torch has no type for, or what is stored with its bytes in the other
        order.
        """
        return (
            ""
            if self.order == ">" and not self.code.endswith("1")
            else dtype_names.NUMPY.get(self.code, "")
        )

    def take_state(self, state: Any) -> None:
        """`(version, byte order, ...)`."""
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

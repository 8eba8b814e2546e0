"""Read pickles with the standard library's `pickle._Unpickler`, with records for everything.

Every way in which an unpickler reaches code is replaced: names are records, calls and states are
checked against `allowed_globals`, items are only put into plain containers. Every length is
compared with what is left of the file before it is read; stack, memo, operations and work are
limited.

What is overridden follows the C unpickler, which is the one that will load the file. Where it
differs from `_Unpickler`, at the ends of frames for instance, the stream is refused.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
import tempfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from reprlib import Repr
from typing import Any

import numpy as np

from stepguard.check.allowed_globals import (
    CALLS,
    DTYPES,
    MAPPINGS,
    NAMED,
    REBUILT,
    RECORDS,
    STATEFUL,
    TENSORS,
    Global,
    is_listed,
)
from stepguard.check.scan import NUMPY, SIZES, STORAGES, Damaged, FileSlice, is_shape

MOST_OPERATIONS = 10_000_000
"""Opcodes of one pickle stream; 100 000 tensors need about 4 million."""
MOST_STACK = 1_000_000
MOST_VALUES = 4_000_000
"""Values in the memo of a stream; values visited when its contents are walked."""
MOST_NAMES = 10_000
"""Importable names that one file refers to."""
MOST_WORK = 20_000_000
"""Items that are compared or copied because an opcode refers to a value of any size."""
LONGEST_TEXT = 16 << 20
LONGEST_LINE = 1 << 16
"""Bytes of a text opcode (GLOBAL, INST, INT, FLOAT); longer byte strings stay in the file."""
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the old format: the magic number, in protocol 2."""
DEEPEST_NESTED = 3
"""Pickles inside pickles."""
_SHORT = Repr()
_SHORT.maxother = 80
shorten = _SHORT.repr
"""`repr` of a value of the file in a line of an error, cut to a few words."""
FAULTS = (
    pickle.UnpicklingError,
    struct.error,
    IndexError,
    TypeError,
    ValueError,
    KeyError,
    OverflowError,
    AttributeError,
)
"""What an opcode or a builder raises when it is given something it does not take."""


class NotPickled(Damaged):
    """No unpickler gets past this byte: the file is not a pickle, or the pickle ends here."""


# --- What a stream becomes: plain containers, and records of what it would have built.


@dataclass(slots=True, eq=False, repr=False)
class PickledObject:
    """An object that pickle would have built: class, arguments, state and items, none of it run."""

    what: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: Any = ()
    entries: Any = ()
    """A list and a dict where the stream put something in; a file may hold millions of objects."""

    def __repr__(self) -> str:
        return f"an object of {self.what}"

    def append(self, item: Any) -> None:
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        if is_listed(self.what):
            raise TypeError(f"items are appended to {self.what}")
        self.items = self.items or []
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        if is_listed(self.what) and self.what not in MAPPINGS:
            raise TypeError(f"items are set in {self.what}")
        self.entries = self.entries or {}
        self.entries[key] = value

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


@dataclass(slots=True, eq=False)
class StorageRecord:
    """Memory that tensors are views of."""

    key: str
    dtype: str
    elements: int
    start: int | None = None
    """Where its bytes begin in the file; None: not found, -1: stored in another form."""
    held: int = 0
    """Bytes that the file holds for it."""
    is_used: bool = False
    """A tensor is a view of it."""

    @property
    def size(self) -> int:
        return self.elements * SIZES[self.dtype]


@dataclass(slots=True, eq=False)
class TensorRecord:
    """A tensor as a view of a storage."""

    storage: StorageRecord | None = None
    """None: an array whose element type torch does not have, or whose bytes are stored as text."""
    viewed_as: str = ""
    """Element type where it is not that of the storage, else empty."""
    offset: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] | None = None
    """None: elements follow each other."""
    parameter: bool = False

    @property
    def dtype(self) -> str:
        return self.viewed_as or (self.storage.dtype if self.storage else "")


@dataclass(slots=True, eq=False)
class ArrayRecord(TensorRecord):
    """A numpy array; its state brings the shape and the bytes."""

    is_filled: bool = False

    def set_state(self, state: Any) -> None:
        """Take `(version, shape, dtype, is_fortran, bytes)`, as numpy's `__setstate__` does."""
        _, shape, dtype, _, raw = state
        # the elements of an array of objects stand in a list
        is_held = isinstance(dtype, NumpyType) and (
            isinstance(raw, list) if dtype.dtype.hasobject else isinstance(raw, PickledBytes | str)
        )
        # only one state: numpy frees the bytes of the first one, which a tensor may still use
        if self.is_filled or not is_held or not is_shape(shape) or min(shape, default=0) < 0:
            raise ValueError("a state that numpy does not write for an array")
        self.is_filled = True
        self.shape = tuple(shape)
        name = dtype.torch_name
        if not isinstance(raw, PickledBytes) or not name:
            return
        storage = StorageRecord("array", name, prod(shape), raw.start, raw.size)
        if storage.size != raw.size:
            raise ValueError(f"an array has {raw.size:,} bytes, its shape needs {storage.size:,}")
        if raw.start >= 0:
            self.storage = storage


@dataclass(slots=True, eq=False)
class NumpyType:
    """A numpy type, which its state may turn to another byte order."""

    dtype: np.dtype[Any]
    is_copy: bool = False
    """Made for this pickle; numpy hands out the same object for a type everywhere else."""

    @property
    def torch_name(self) -> str:
        """Return torch's name; empty if torch has no such type or the bytes are big-endian."""
        return NUMPY.get(self.dtype.str.lstrip("<|"), "")

    def set_state(self, state: Any) -> None:
        """Take `(version, order, subtype, names, fields, size, alignment, flags[, metadata])`.

        numpy believes all of it. Flags that deny an object turn bytes into pointers, and so does
        a field that lies outside of its element.
        """
        _, order, subtype, names, fields, *_ = state
        if subtype is not None or names is not None or fields is not None:
            raise Damaged(
                "format",
                "a structured NumPy type is not read, because NumPy trusts the field "
                "offsets in the file; save each column as a separate array",
            )
        found = self.dtype.newbyteorder(order) if order in ("<", ">") else self.dtype
        written = found.__reduce__()[2]
        # the last part of nine is the unit of a date
        if not self.is_copy or state[:8] != written[:8] or len(state) != len(written):
            raise ValueError(f"a state that numpy does not write for the type {found}")
        self.dtype = found


# --- Calls: the kinds that arguments may have, and what builds the record of a value.


def _is_tensor(value: Any) -> bool:
    is_rebuilt = isinstance(value, PickledObject) and str(value.what).startswith(
        "torch._utils._rebuild_"
    )
    return is_rebuilt or isinstance(value, TensorRecord)


def _is_quantizer(value: Any) -> bool:
    if type(value) is not tuple or not value or value[0] not in NAMED:
        return False
    for part in value[1:]:
        numbers = part if type(part) is list else [part]
        if not _is_tensor(part) and not all(type(number) in (int, float) for number in numbers):
            return False
    return True


KINDS: dict[str, Any] = {
    "text": str,
    "int": int,
    "float": float,
    "bool": bool,
    "none": type(None),
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "bytes": PickledBytes,
    "global": Global,
    "storage": StorageRecord,
    "array": ArrayRecord,
    "named": NAMED,
    "dtype": DTYPES.keys(),
    "subclass": TENSORS,
    "rebuilt": REBUILT,
    "any": lambda value: True,
    # not `1e999999999`, which takes all memory there is
    "ratio": lambda value: (
        type(value) is str and bool(re.fullmatch(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?", value))
    ),
    # torch writes an empty OrderedDict: hooks are not saved
    "empty": lambda value: not value,
    # plain dicts only: torch sets one attribute after the other
    "attributes": lambda value: all(
        part is None or type(part) is dict
        for part in (value if isinstance(value, tuple) else (value,))
    ),
    "shape": is_shape,
    # its state brings the memory; here it could be asked for without a byte in the file
    "sizeless": lambda value: is_shape(value) and not any(value),
    "number_type": lambda value: isinstance(value, NumpyType) and not value.dtype.hasobject,
    "tensor": _is_tensor,
    "quantizer": _is_quantizer,
    "sparse": lambda value: (
        type(value) is tuple
        and all(_is_tensor(part) or type(part) is bool or is_shape(part) for part in value)
    ),
}
"""Kinds of arguments: values of exactly a type, names on a list, or what a rule of its own says."""


def is_kind(value: Any, kind: str) -> bool:
    """Is the value of one of the kinds between the bars?

    `=word` is that very text, `@module.name` that very name, and a word that is in no table the
    name of what made the value.
    """
    for word in kind.strip("!?*").split("|"):
        kind_of = KINDS.get(word)
        if isinstance(kind_of, type):
            found = type(value) is kind_of
        elif callable(kind_of):
            found = kind_of(value)
        elif kind_of is not None:
            found = isinstance(value, Global) and value in kind_of
        elif word[0] == "=":
            found = type(value) is str and value == word[1:]
        elif word[0] == "@":
            found = isinstance(value, Global) and str(value) == word[1:]
        else:
            found = isinstance(value, PickledObject) and str(value.what) == word
        if found:
            return True
    return False


BUILDERS: dict[str, Callable[..., Any]] = {
    "builtins.complex": lambda machine, real, imaginary: (real * 1.0, imaginary * 1.0),
    "torch.Size": lambda machine, sizes=(): tuple(sizes),
    "numpy._core.multiarray._reconstruct": lambda machine, *_: ArrayRecord(),
}
"""What builds the record of a call whose value or arguments matter; others become objects."""


def _builds(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(build: Callable[..., Any]) -> Callable[..., Any]:
        BUILDERS.update(dict.fromkeys(names.split(), build))
        return build

    return note


MODULE_ID = ("=module", "global", "text|none", "text|none")
STORAGE_ID = ("=storage", "global", "text", "text", "int", "any?")


@_builds(
    "torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 "
    "torch._utils._rebuild_qtensor"
)
def _tensor(
    machine: PickleReader, storage: Any, offset: int, shape: Any, stride: Any, *more: Any
) -> TensorRecord:
    # the third version is for types that have no storage class, such as uint16 or float8
    dtype = ""
    for value in more:
        if isinstance(value, Global):
            dtype = DTYPES[value]
    return TensorRecord(storage, dtype, offset, tuple(shape), tuple(stride))


@_builds("torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state")
def _parameter(
    machine: PickleReader, data: Any, requires_grad: bool, hooks: Any, state: Any = None
) -> Any:
    machine.check_state(state)
    if isinstance(data, TensorRecord):
        data.parameter = True
    return data


@_builds("torch._tensor._rebuild_from_type_v2")
def _tensor_subclass(
    machine: PickleReader, function: Global, kind: Global, arguments: Any, state: Any
) -> Any:
    """Build the tensor of a subclass, or of one with attributes: torch calls `function` for it."""
    if kind not in TENSORS:
        machine.names[kind] = True
    machine.check_state(state)
    tensor = machine.call(function, arguments)
    if isinstance(tensor, PickledObject):
        tensor.state = state
    return tensor


@_builds("torch.storage._load_from_bytes")
def _nested_storage(machine: PickleReader, raw: PickledBytes) -> StorageRecord:
    """Build a storage that a plain pickle holds as a whole torch.save of its own."""
    # once for all calls with the same bytes, which stay in memory for as long as their id counts
    if id(raw) not in machine.nested:
        machine.nested[id(raw)] = (raw, machine.read_nested(raw))
    return machine.nested[id(raw)][1]


@_builds("collections.OrderedDict collections.Counter builtins.dict")
def _dict_of(machine: PickleReader, items: Any = ()) -> dict[Any, Any]:
    # a copy, as pickle makes one: what is put into `items` later does not belong to it
    machine.spend(8 * len(items))
    if isinstance(items, dict):
        return dict(items)
    pairs = list(items)
    machine.check_keys(key for key, _ in pairs)
    return dict(pairs)


@_builds("collections.defaultdict")
def _defaultdict(machine: PickleReader, factory: Any = None, items: Any = ()) -> Any:
    return _dict_of(machine, items)


@_builds("collections.deque builtins.list builtins.tuple")
def _list_of(machine: PickleReader, items: Any = (), longest: Any = None) -> list[Any]:
    machine.spend(len(items))
    return list(items)


@_builds("builtins.set builtins.frozenset")
def _set_of(machine: PickleReader, items: Any = ()) -> frozenset[Any]:
    machine.check_keys(items)
    return frozenset(items)


@_builds("builtins.bytes builtins.bytearray _codecs.encode")
def _encoded(machine: PickleReader, text: Any = "", encoding: str = "utf-8") -> PickledBytes:
    """Build bytes as protocol 2 writes them: as a text that `_codecs.encode` turns into bytes."""
    if isinstance(text, PickledBytes):
        return text
    machine.spend(len(text) // 8)
    data = text.encode(encoding)
    # in the file they are UTF-8, not the bytes themselves, so there is no offset to give
    return PickledBytes(-1, len(data), data)


@_builds("numpy.dtype")
def _numpy_type(machine: PickleReader, code: Any, align: Any = 0, copy: Any = 0) -> NumpyType:
    text = code
    if isinstance(code, PickledBytes):
        text = (code.data or b"").decode("latin-1")
    # neither names of types nor lists of fields
    if not re.fullmatch(r"[<>=|]?[A-Za-z?][0-9]{0,9}(\[[0-9a-zA-Z]{1,9}\])?", text):
        raise ValueError(f"{shorten(text)} is not a plain numpy type")
    return NumpyType(np.dtype(text), bool(copy))


@_builds("numpy._core.multiarray.scalar")
def _numpy_number(machine: PickleReader, kind: Any, raw: Any) -> Any:
    if isinstance(raw, str) or raw.data is None or kind.dtype.kind not in "fiub":
        return PickledObject(Global("numpy._core.multiarray", "scalar"), (kind, raw))
    (number,) = np.frombuffer(raw.data, kind.dtype).tolist()
    return number


@_builds("numpy._core.numeric._frombuffer")
def _array_from(
    machine: PickleReader, raw: PickledBytes, dtype: NumpyType, shape: Any, *_: Any
) -> ArrayRecord:
    array = ArrayRecord()
    array.set_state((1, shape, dtype, False, raw))
    return array


@_builds("copyreg._reconstructor")
def _reconstructed(machine: PickleReader, kind: Any, base: Any, state: Any) -> PickledObject:
    """Build an object as protocol 0 and 1 do, by `base.__new__(kind, state)`."""
    is_object = base == Global("builtins", "object") and state is None
    is_dict = kind in MAPPINGS and base == Global("builtins", "dict") and state == {}
    if not isinstance(kind, Global) or not (is_object or is_dict):
        raise ValueError(f"{shorten(kind)} made as a {shorten(base)}")
    if is_listed(kind) and kind not in RECORDS and kind not in MAPPINGS:
        machine.names[kind] = True
    return PickledObject(kind)


def takes_state(what: Any, state: Any) -> bool:
    """May what was made by a listed name be given this state?"""
    # their `__setstate__` looks into the values, and a value of omegaconf runs a resolver for it
    if what.package in ("torch", "numpy", "uuid"):
        values = state.values() if isinstance(state, dict) else state
        if any(map(_is_lazy, values if isinstance(values, Iterable) else (state,))):
            return False
    # not a mapping: pickle asks it for `__setstate__`, and its items answer as attributes
    return what in STATEFUL or (isinstance(state, dict) and what in RECORDS)


def is_key(value: PickledObject) -> bool:
    """Is it hashed and compared by code that does nothing else?"""
    if value.what not in RECORDS:
        return not _is_lazy(value)
    fields = value.state.values() if isinstance(value.state, dict) else ()
    return all(is_kind(each, "text|int|float|bool|none|shape") for each in fields)


def _is_lazy(value: Any) -> bool:
    """Is it a value of omegaconf, which resolves `${...}` where it is read or compared?"""
    is_named = isinstance(value, PickledObject) and isinstance(value.what, Global)
    return is_named and value.what.package == "omegaconf"


# --- The machine.

_UNPICKLER: Any = pickle._Unpickler
_STOP: Any = pickle._Stop  # type: ignore[attr-defined]
"""Typeshed knows neither the opcodes of the one nor the other."""
OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
GOES_ON = pickle.INT + pickle.READONLY_BUFFER + pickle.BUILD + b"aesu"
"""Opcodes with which the C unpickler takes more than this one: octal numbers, other buffers, a
state of None, and items of a bytearray (APPEND, APPENDS, SETITEM, SETITEMS).
"""
MOST_KEY_PARTS = 1000
"""Values in one key: a tuple of tuples is hashed all the way down."""


def _hashes(load: Callable[[PickleReader], None], keys: slice) -> Callable[[PickleReader], None]:
    """Make an opcode that hashes these values of the stack; they are checked before."""

    def checked(machine: PickleReader) -> None:
        machine.check_keys(machine.stack[keys])
        load(machine)

    return checked


def _byte_string(width: int) -> Callable[[PickleReader], None]:
    """Make the opcode of a byte string; a long one stays in the file, it may be gigabytes."""

    def load(machine: PickleReader) -> None:
        count = int.from_bytes(machine.read(width), "little")
        start = machine.file.tell()
        machine.source.check_left(start, count)
        data = None
        if count <= LONGEST_LINE:
            data = machine.file.read(count)
        else:
            machine.file.seek(count, 1)
        machine.check_frame(count)
        machine.append(PickledBytes(machine.source.start + start, count, data))

    return load


class PickleReader(_UNPICKLER):  # type: ignore[misc]
    """Reads the pickles of one file, and those that they hold as byte strings."""

    def __init__(self, source: FileSlice, depth: int = 0) -> None:
        self.file = source.reader()
        super().__init__(self.file)
        self.source = source
        self.is_legacy = source.at(0, len(LEGACY_START)) == LEGACY_START
        self.names: dict[Global, bool] = {}
        """Every name, and whether the stream uses it in a way that is not on the list."""
        self.storages: dict[str, StorageRecord] = {}
        """Every storage that the pickles name, used or not."""
        self.nested: dict[int, tuple[PickledBytes, StorageRecord]] = {}
        """Bytes that torch would load as pickles of their own, by identity, and their storage."""
        self._depth = depth
        self._work = 0

    def load(self) -> Any:
        """Return the value of the next pickle; raises Damaged if its end is not reached."""
        self.memo: dict[int, Any] = {}
        self.read = self._read
        self.readline = self._readline
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        self.frame_end = 0
        read = self.file.read
        dispatch = self.dispatch
        code = -1
        try:
            for count in range(MOST_OPERATIONS):
                code = read(1)[0]
                dispatch[code](self)
                # stack and memo are measured now and then only
                if not count % 1024:
                    self._check_size()
        except _STOP as stop:
            self._check_size()
            # where the next pickle begins would depend on how much was read ahead
            if self.frame_end > self.file.tell():
                raise Damaged("malformed", "the pickle ends before its last frame") from None
            return stop.value
        except FAULTS as error:
            at = self.file.tell()
            if at >= self.source.size:
                detail = f"the pickle ends at byte {at:,} without a STOP opcode"
                raise NotPickled("torn", detail) from None
            if code not in OPCODES:
                detail = f"byte {code:#04x} at {at - 1:,} is not a pickle opcode"
                raise NotPickled("malformed", detail) from None
            detail = f"pickle opcode {OPCODES[code]} at byte {at:,}: {error}"
            if code in GOES_ON and not isinstance(error, IndexError):
                raise Damaged("malformed", detail) from None
            raise NotPickled("malformed", detail) from None
        raise Damaged("limit", f"the pickle has more than {MOST_OPERATIONS:,} operations")

    def _check_size(self) -> None:
        deepest = max(len(self.stack), len(self.metastack))
        if deepest > MOST_STACK or len(self.memo) > MOST_VALUES or len(self.names) > MOST_NAMES:
            raise Damaged(
                "limit",
                f"the pickle stacks more than {MOST_STACK:,} values, remembers more than "
                f"{MOST_VALUES:,}, or refers to more than {MOST_NAMES:,} names",
            )

    def _read(self, count: int) -> bytes:
        if count > 255:
            self.source.check_left(self.file.tell(), count)
            # a text that the file cannot hold is torn, not too long
            if count > LONGEST_TEXT:
                raise Damaged("limit", f"a text of {count:,} bytes at byte {self.file.tell():,}")
        data = self.file.read(count)
        self.check_frame(count)
        return data

    def _readline(self) -> bytes:
        line = self.file.readline(LONGEST_LINE)
        at = self.file.tell()
        # a zero byte in a number is where the C unpickler stops reading
        if not line.endswith(b"\n") or b"\0" in line:
            raise Damaged(
                "malformed",
                f"the line before byte {at:,} is longer than {LONGEST_LINE:,} bytes or contains a "
                "zero byte",
            )
        self.check_frame(len(line))
        return line

    def check_frame(self, count: int) -> None:
        """Refuse what crosses the end of a frame: the C unpickler loses the part inside it."""
        if self.frame_end:
            at = self.file.tell()
            if at - count < self.frame_end < at:
                raise Damaged("malformed", f"an argument crosses the end of a frame at byte {at:,}")
            if at > self.frame_end:
                self.frame_end = 0

    def find_class(self, module: str, name: str) -> Global:
        """Return the record of a name, under the module that Python 3 has for it."""
        if self.proto < 3:
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[module, name]
            else:
                module = IMPORT_MAPPING.get(module, module)
        # numpy 2 has renamed it; the old name leads to the same functions
        found = Global(module.replace("numpy.core.", "numpy._core."), name)
        self.names.setdefault(found, False)
        return found

    def get_extension(self, code: int) -> None:
        # what the code stands for is in the copyreg registry of the program that loads the file
        self.append(self.find_class("copyreg", f"extension {code}"))

    def call(self, what: Any, arguments: Any) -> Any:
        """Return the record of a call; one that is not on the list is noted as such."""
        if isinstance(what, PickledObject):
            raise Damaged(
                "hostile", "the pickle would call an object that it built; nothing was run"
            )
        if not isinstance(arguments, tuple) or not isinstance(what, Global):
            raise Damaged(
                "malformed",
                f"the pickle calls {type(what).__name__} with {type(arguments).__name__}",
            )
        if what not in CALLS:
            self.names[what] = True
            return PickledObject(what, arguments)
        try:
            self.check_arguments(what, arguments, CALLS[what])
            build = BUILDERS.get(str(what))
            return PickledObject(what, arguments) if build is None else build(self, *arguments)
        except FAULTS as error:
            raise Damaged(
                "malformed", f"{what} is called with arguments it does not accept: {error}"
            ) from None

    def check_arguments(self, what: Any, arguments: tuple[Any, ...], kinds: Sequence[str]) -> None:
        """Raise ValueError if these are not arguments of the kinds that are stated."""
        for place, value in enumerate(arguments):
            kind = kinds[min(place, len(kinds) - 1)] if kinds else ""
            if place >= len(kinds) and not kind.endswith("*"):
                raise ValueError(f"too many arguments: {len(arguments)}")
            if is_kind(value, kind):
                continue
            if kind.startswith("!"):
                if isinstance(value, Global):
                    self.names[value] = True
                raise Damaged(
                    "hostile", f"{what} would call or load {shorten(value)}; nothing was run"
                )
            raise ValueError(f"{shorten(value)} is not of the kind {kind}")
        required = [kind for kind in kinds if kind[-1] not in "?*"]
        if len(arguments) < len(required):
            raise ValueError(f"at least {len(required)} arguments are needed, got {len(arguments)}")

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.append(self.call(klass, tuple(args)))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        """Push the record of `cls.__new__(cls, *arguments)`, which runs no constructor."""
        arguments = self.stack.pop()
        what = self.stack[-1]
        is_record = isinstance(what, Global) and (what in RECORDS or not is_listed(what))
        if is_record and arguments == ():
            self.stack[-1] = PickledObject(what)
        else:
            self.stack[-1] = self.call(what, arguments)

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError(f"an object is made with a {type(arguments).__name__} of arguments")
        self.stack[-1] = self.call(self.stack[-1], (*arguments, keywords))

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        # pickle would write into the attributes of the imported thing, shared by the whole process
        if isinstance(target, Global):
            detail = f"the pickle would change {target} itself, for the whole program"
            raise Damaged("hostile", f"{detail}; nothing was run")
        if isinstance(target, ArrayRecord | NumpyType):
            target.set_state(state)
            return
        self.check_state(state)
        if isinstance(target, PickledObject) and target.state is None:
            if is_listed(target.what) and not takes_state(target.what, state):
                raise TypeError(f"{target.what} is given a {type(state).__name__} as its state")
            # pickle copies it into the object: what is put into the dict later is not there
            target.state = dict(state) if type(state) is dict else state
        # an OrderedDict: the state dict of a module carries its `_metadata` so
        elif not (isinstance(target, dict) and isinstance(state, dict)):
            raise TypeError(f"a {type(target).__name__} is given a state, or a second one")

    def check_state(self, state: Any) -> None:
        """Refuse a state that would replace a method, `__setstate__` itself above all."""
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if not isinstance(part, dict):
                continue
            self.spend(len(part))
            for key in part:
                if isinstance(key, str) and key.startswith("__") and key.endswith("__"):
                    raise Damaged(
                        "hostile", f"the pickle would set {key[:80]} of an object; nothing was run"
                    )

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys and members of sets that are not hashed and compared at once."""
        for key in keys:
            parts = [key]
            for part in parts:
                if isinstance(part, tuple | frozenset):
                    self.spend(len(part))
                    parts.extend(part)
                    if len(parts) > MOST_KEY_PARTS:
                        raise Damaged("limit", f"a key of more than {MOST_KEY_PARTS:,} values")
                elif isinstance(part, PickledObject) and not is_key(part):
                    raise Damaged(
                        "hostile",
                        f"the pickle would compare {part.what} with other keys, which can "
                        "run other code; nothing was run",
                    )

    def load_frame(self) -> None:
        count = int.from_bytes(self.read(8), "little")
        at = self.file.tell()
        # a frame longer than the file was cut off or forged
        self.source.check_left(at, count)
        if at < self.frame_end:
            raise Damaged("malformed", f"a frame begins inside another one at byte {at:,}")
        self.frame_end = at + count

    def load_long4(self) -> None:
        count = int.from_bytes(self.read(4), "little", signed=True)
        if not 0 <= count <= self.source.size - self.file.tell():
            raise ValueError(f"an integer of {count:,} bytes")
        # no integer of a checkpoint is longer
        if count > 1 << 10:
            raise Damaged("limit", f"an integer of {count:,} bytes at byte {self.file.tell():,}")
        self.append(int.from_bytes(self.read(count), "little", signed=True))

    def _decode_string(self, value: bytes) -> str | PickledBytes:
        # Python 2 had one type for texts and bytes; torch.load decodes them as UTF-8
        try:
            return value.decode()
        except UnicodeDecodeError:
            return PickledBytes(-1, len(value), value)

    def spend(self, count: int) -> None:
        """Count work that the stream can ask for again and again; Damaged if it is too much."""
        self._work += count
        if self._work > MOST_WORK:
            raise Damaged("limit", f"reading it takes more than {MOST_WORK:,} comparisons")

    # --- A whole file: one stream, or the five pickles and raw storages of torch.save before 1.6.

    def value(self) -> Any:
        """Return the value of a file that is one pickle, or an old torch.save."""
        found = self.load()
        end = self.file.tell()
        if self.is_legacy:
            # the third pickle holds byte order and sizes of the machine that wrote it
            protocol, _, value, keys = [self.load() for _ in range(4)]
            if found != 0x1950A86A20F9469CFC6C or protocol != 1001 or not isinstance(keys, list):
                raise Damaged("malformed", "its first pickles are not those of torch.save")
            found = value
            end = self.file.tell()
            # the storages follow its pickles
            for key in keys:
                storage = self.storages.get(key) if isinstance(key, str) else None
                if storage is None or storage.start is not None:
                    detail = f"names {shorten(key)}, which is unknown or listed twice"
                    raise Damaged("malformed", f"its list of storages {detail}")
                count = int.from_bytes(self.source.exactly(end, 8), "little", signed=True)
                if count != storage.elements:
                    detail = f"has {count:,} elements, but the pickle says {storage.elements:,}"
                    raise Damaged("torn", f"storage {key} {detail}")
                storage.held = storage.size
                storage.start = self.source.part(end + 8, storage.size).start
                end += 8 + storage.size
        # torch.load goes on reading if the first value equals its magic number
        left = self.source.size - end
        if left:
            raise Damaged("format", f"{left:,} bytes follow its end; they were not read")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Parse an id of torch.save: `("storage", type, key, location, elements[, view])`."""
        fields = pid if isinstance(pid, tuple) else ()
        try:
            # the old format names the class and the source text of every module
            if fields[:1] == ("module",):
                self.check_arguments("an id", fields, MODULE_ID)
                return fields[1]
            self.check_arguments("an id", fields, STORAGE_ID)
            _, kind, key, _, elements, *views = fields
            dtype = STORAGES[kind.name]
            if elements < 0:
                raise ValueError(f"{elements} elements")
        except (ValueError, KeyError) as error:
            raise Damaged(
                "malformed", f"a persistent id that torch.save does not write: {error}"
            ) from None
        # `(key, offset, size)` of a view, where newer versions write None or nothing
        if any(views):
            raise Damaged(
                "format",
                "storages that are views of others (torch before 0.4); save it again with "
                "torch.save",
            )
        return self.storages.setdefault(key, StorageRecord(key, dtype, elements))

    def read_nested(self, raw: PickledBytes) -> StorageRecord:
        """Read a byte string that torch would load as a pickle of its own."""
        if self._depth >= DEEPEST_NESTED:
            raise Damaged("limit", f"pickles are nested more than {DEEPEST_NESTED} deep")
        with tempfile.TemporaryFile() if raw.start < 0 else nullcontext() as copy:
            inner = FileSlice(self.source.descriptor, raw.start, raw.size)
            # protocol 2 encodes bytes: they are only in memory, and a slice needs a file
            if copy is not None:
                copy.write(raw.data or b"")
                copy.flush()
                inner = FileSlice(copy.fileno(), 0, raw.size)
            reader = PickleReader(inner, self._depth + 1)
            reader.names = self.names
            if not reader.is_legacy:
                raise Damaged(
                    "format",
                    "it holds bytes that torch would load as a pickle, but that are not "
                    "in the old torch.save format; they were not read",
                )
            value = reader.value()
        if not isinstance(value, StorageRecord):
            return StorageRecord("nested", "", 0)
        if raw.start < 0:
            value.start = -1
        return value

    dispatch = dict(_UNPICKLER.dispatch)  # noqa: RUF012


for _opcode in ("reduce", "newobj", "newobj_ex", "build", "frame", "long4"):
    PickleReader.dispatch[getattr(pickle, _opcode.upper())[0]] = getattr(
        PickleReader, f"load_{_opcode}"
    )
for _code, _keys in (
    (pickle.DICT, slice(None, None, 2)),
    (pickle.SETITEMS, slice(None, None, 2)),
    (pickle.SETITEM, slice(-2, -1)),
    (pickle.ADDITEMS, slice(None)),
    (pickle.FROZENSET, slice(None)),
):
    PickleReader.dispatch[_code[0]] = _hashes(_UNPICKLER.dispatch[_code[0]], _keys)
for _code, _width in (
    (pickle.SHORT_BINBYTES, 1),
    (pickle.BINBYTES, 4),
    (pickle.BINBYTES8, 8),
    (pickle.BYTEARRAY8, 8),
):
    PickleReader.dispatch[_code[0]] = _byte_string(_width)

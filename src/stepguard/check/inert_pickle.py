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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

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
from stepguard.check.bounded_file import NUMPY, SIZES, STORAGES, Damaged, FileSlice, is_shape

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
"""Of a text opcode: GLOBAL, INST, INT, FLOAT, ...; a longer byte string stays in the file."""
LONGEST_INTEGER = 1 << 10
"""Bytes of one integer."""
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the old format: the magic number, in protocol 2."""
DEEPEST_NESTED = 3
"""Pickles inside pickles."""
STRIDE = 1024
"""Operations between two checks of the size of stack and memo."""
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


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object that pickle would have built: class, arguments, state and items, none of it run."""

    what: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: Any = ()
    entries: Any = ()
    """A list and a dict where the stream put something in; a file may hold millions of objects."""

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
    start: int | None = None
    """Of its bytes in the file; None: not found, -1: they do not lie in the file as they are."""
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

    storage: StorageRecord
    viewed_as: str
    """Element type where it is not that of the storage, else empty."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool = False

    @property
    def dtype(self) -> str:
        return self.viewed_as or self.storage.dtype


@dataclass(slots=True, eq=False)
class ArrayRecord:
    """A numpy array whose bytes stand in the stream."""

    raw: PickledBytes | None = None
    dtype: str = ""
    """Empty if torch has no such type."""
    shape: tuple[int, ...] = ()
    is_filled: bool = False
    parameter: bool = False

    def set_state(self, state: Any) -> None:
        """Take `(version, shape, dtype, is_fortran, bytes)`, as numpy's `__setstate__` does."""
        _, shape, dtype, _, raw = state
        # the elements of an array of objects stand in a list
        is_held = isinstance(dtype, NumpyType) and (
            isinstance(raw, list) if dtype.is_object else isinstance(raw, PickledBytes | str)
        )
        # only one state: numpy frees the bytes of the first one, which a tensor may still use
        if self.is_filled or not is_held or not is_shape(shape) or min(shape, default=0) < 0:
            raise ValueError("a state that numpy does not write for an array")
        self.is_filled = True
        if not isinstance(raw, PickledBytes):
            return
        self.raw = raw
        self.dtype = dtype.torch_name
        self.shape = tuple(shape)
        needed = prod(shape) * SIZES.get(self.dtype, 0)
        if self.dtype and needed != raw.size:
            raise ValueError(f"an array has {raw.size:,} bytes, its shape needs {needed:,}")


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
        return NUMPY.get(self.code, "")

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


def brief(value: Any) -> str:
    """Describe a value of any size and depth in a few letters, for a message."""
    # str() of an int with very many digits takes quadratic time, and Python refuses it
    huge = isinstance(value, int) and value.bit_length() > 64
    if isinstance(value, str | int | float | Global) and not huge:
        return str(value)[:80]
    return f"a {type(value).__name__}"


# --- Calls: the kinds that arguments may have, and what builds the record of a value.


def _made_by(value: Any, name: str) -> bool:
    return isinstance(value, PickledObject) and str(value.what) == name


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


def _is_generator(value: Any) -> bool:
    if isinstance(value, Global) and value in NAMED and value.module.startswith("numpy.random._"):
        value = value.name
    return value in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


FACTORIES = """
    builtins.list builtins.dict builtins.int builtins.float builtins.set builtins.str builtins.tuple
    builtins.bool collections.OrderedDict collections.defaultdict collections.Counter
    collections.deque
"""
TYPES: dict[str, type] = {
    "text": str,
    "int": int,
    "bool": bool,
    "none": type(None),
    "tuple": tuple,
    "dict": dict,
    "bytes": PickledBytes,
    "global": Global,
    "storage": StorageRecord,
    "array": ArrayRecord,
}
"""Kinds of arguments that are told by their exact type."""
KINDS: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "encoding": lambda value: value in ("latin1", "latin-1", "utf-8", "ascii"),
    "number": lambda value: isinstance(value, int | float),
    # not `1e999999999`, which takes all memory there is
    "ratio": lambda value: (
        type(value) is str and bool(re.fullmatch(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?", value))
    ),
    "plain": lambda value: value is None or type(value) in (str, int, float, bool),
    "items": lambda value: isinstance(value, list | tuple | dict),
    "counts": lambda value: isinstance(value, dict) or value in ([], ()),
    "factory": lambda value: (
        value is None or (isinstance(value, Global) and str(value) in FACTORIES.split())
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
    "dtype": lambda value: isinstance(value, Global) and value in DTYPES,
    "layout": lambda value: (
        _made_by(value, "torch.serialization._get_layout")
        or (isinstance(value, Global) and value in NAMED)
    ),
    "device": lambda value: type(value) is str or _made_by(value, "torch.device"),
    "number_type": lambda value: isinstance(value, NumpyType) and not value.is_object,
    "ndarray": lambda value: value == Global("numpy", "ndarray"),
    "tensor": _is_tensor,
    "quantizer": _is_quantizer,
    "sparse": lambda value: (
        type(value) is tuple
        and all(_is_tensor(part) or type(part) is bool or is_shape(part) for part in value)
    ),
    "subclass": lambda value: isinstance(value, Global) and value in TENSORS,
    "rebuilt": lambda value: isinstance(value, Global) and value in REBUILT,
    "generator": _is_generator,
    "generator_maker": lambda value: (
        value == Global("numpy.random._pickle", "__bit_generator_ctor")
    ),
    "seeds": lambda value: value == Global("numpy.random.bit_generator", "SeedSequence"),
}
"""Kind of an argument -> is this one? Words that are in no table are the name of what made it."""
NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
           "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}  # fmt: skip
"""Letter code of a numpy type -> that of `struct`."""


MODULE_ID = ("=module", "global", "text|none", "text|none")
STORAGE_ID = ("=storage", "global", "text", "text", "int")


def is_kind(value: Any, kind: str) -> bool:
    """Is the value of one of the kinds between the bars? `=word` is that very text."""
    for word in kind.strip("!?*").split("|"):
        if word in TYPES:
            found = type(value) is TYPES[word]
        elif word in KINDS:
            found = KINDS[word](value)
        else:
            found = _made_by(value, word) or (type(value) is str and f"={value}" == word)
        if found:
            return True
    return False


def _tensor(
    machine: PickleReader, storage: Any, offset: int, shape: Any, stride: Any, *more: Any
) -> TensorRecord:
    # the third version is for types that have no storage class, such as uint16 or float8
    dtype = ""
    for value in more:
        if isinstance(value, Global):
            dtype = DTYPES[value]
    return TensorRecord(storage, dtype, offset, tuple(shape), tuple(stride))


def _parameter(
    machine: PickleReader, data: Any, requires_grad: bool, hooks: Any, state: Any = None
) -> Any:
    machine.check_state(state)
    if isinstance(data, TensorRecord):
        data.parameter = True
    return data


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


def _nested_storage(machine: PickleReader, raw: PickledBytes) -> StorageRecord:
    """Build a storage that a plain pickle holds as a whole torch.save of its own."""
    return machine.nested.setdefault(id(raw), (raw, StorageRecord("nested", "", 0)))[1]


def _dict_of(machine: PickleReader, items: Any = ()) -> dict[Any, Any]:
    # a copy, as pickle makes one: what is put into `items` later does not belong to it
    machine.spend(8 * len(items))
    if isinstance(items, dict):
        return dict(items)
    return {machine.key(key): value for key, value in items}


def _list_of(machine: PickleReader, items: Any = (), longest: Any = None) -> list[Any]:
    machine.spend(len(items))
    return list(items)


def _set_of(machine: PickleReader, items: Any = ()) -> list[Any]:
    for item in items:
        machine.key(item)
    return _list_of(machine, items)


def _encoded(machine: PickleReader, text: Any = "", encoding: str = "utf-8") -> PickledBytes:
    """Build bytes as protocol 2 writes them: as a text that `_codecs.encode` turns into bytes."""
    if isinstance(text, PickledBytes):
        return text
    machine.spend(len(text) // 8)
    data = text.encode(encoding)
    # in the file they are UTF-8, not the bytes themselves, so there is no offset to give
    return PickledBytes(-1, len(data), data)


def _numpy_type(machine: PickleReader, code: Any, *flags: Any) -> NumpyType:
    text = code
    if isinstance(code, PickledBytes):
        text = (code.data or b"").decode("latin-1")
    found = re.fullmatch(r"([<>=|]?)([A-Za-z?][0-9]{0,9})(\[[0-9a-zA-Z]{1,9}\])?", text)
    if found is None:
        raise ValueError(f"{brief(text)} is not a plain numpy type")
    order = ">" if found[1] == ">" else "<"
    return NumpyType(found[2], order, is_copy=len(flags) == 2 and flags[1])


def _numpy_number(machine: PickleReader, dtype: Any, raw: Any) -> Any:
    if isinstance(raw, str) or raw.data is None or dtype.code not in NUMBERS:
        return PickledObject(Global("numpy._core.multiarray", "scalar"), (dtype, raw))
    order = ">" if dtype.order == ">" else "<"
    return struct.unpack(order + NUMBERS[dtype.code], raw.data)[0]


def _array_from(
    machine: PickleReader, raw: PickledBytes, dtype: NumpyType, shape: Any, *_: Any
) -> ArrayRecord:
    array = ArrayRecord()
    array.set_state((1, shape, dtype, False, raw))
    return array


def _reconstructed(machine: PickleReader, kind: Any, base: Any, state: Any) -> PickledObject:
    """Build an object as protocol 0 and 1 do, by `base.__new__(kind, state)`."""
    is_object = base == Global("builtins", "object") and state is None
    is_dict = kind in MAPPINGS and base == Global("builtins", "dict") and state == {}
    if not isinstance(kind, Global) or not (is_object or is_dict):
        raise ValueError(f"{brief(kind)} made as a {brief(base)}")
    if is_listed(kind) and kind not in RECORDS and kind not in MAPPINGS:
        machine.names[kind] = True
    return PickledObject(kind)


BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict_of,
    "collections.defaultdict": lambda machine, factory=None, items=(): _dict_of(machine, items),
    "collections.Counter": _dict_of,
    "collections.deque": _list_of,
    "builtins.set": _set_of,
    "builtins.frozenset": lambda machine, items=(): tuple(_set_of(machine, items)),
    "builtins.list": _list_of,
    "builtins.tuple": _list_of,
    "builtins.dict": _dict_of,
    "builtins.bytes": _encoded,
    "builtins.bytearray": _encoded,
    "builtins.complex": lambda machine, real, imaginary: (real * 1.0, imaginary * 1.0),
    "torch.Size": lambda machine, sizes=(): tuple(sizes),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_qtensor": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_subclass,
    "torch.storage._load_from_bytes": _nested_storage,
    "numpy.core.multiarray._reconstruct": lambda machine, *_: ArrayRecord(),
    "numpy._core.multiarray._reconstruct": lambda machine, *_: ArrayRecord(),
    "numpy.core.multiarray.scalar": _numpy_number,
    "numpy._core.multiarray.scalar": _numpy_number,
    "numpy.core.numeric._frombuffer": _array_from,
    "numpy._core.numeric._frombuffer": _array_from,
    "numpy.dtype": _numpy_type,
    "_codecs.encode": _encoded,
    "copyreg._reconstructor": _reconstructed,
}
"""What builds the record of a call whose value or arguments matter; others become objects."""


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
    return all(KINDS["plain"](each) or is_shape(each) for each in fields)


def _is_lazy(value: Any) -> bool:
    """Is it a value of omegaconf, which resolves `${...}` where it is read or compared?"""
    is_named = isinstance(value, PickledObject) and isinstance(value.what, Global)
    return is_named and value.what.package == "omegaconf"


# --- The machine.

_UNPICKLER: Any = pickle._Unpickler
_STOP: Any = pickle._Stop  # type: ignore[attr-defined]
"""Typeshed knows neither the opcodes of the one nor the other."""
OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
PLAIN_KEYS = (str, int, float, bool, type(None), bytes, Global, PickledObject)


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
                if not count % STRIDE:
                    self._check_size()
        except _STOP as stop:
            self._check_size()
            # where the next pickle begins would depend on how much was read ahead
            if self.frame_end > self.file.tell():
                raise Damaged("malformed", "the pickle ends before its last frame") from None
            return stop.value
        except FAULTS as error:
            raise self._damage(code, error) from None
        raise Damaged("limit", f"the pickle has more than {MOST_OPERATIONS:,} operations")

    def _damage(self, code: int, error: Exception) -> Damaged:
        at = self.file.tell()
        if at >= self.source.size:
            return NotPickled("torn", f"the pickle ends at byte {at:,} without its end")
        if code not in OPCODES:
            return NotPickled("malformed", f"byte {code:#04x} at {at - 1:,} is not a pickle opcode")
        detail = f"pickle opcode {OPCODES[code]} at byte {at:,}: {error}"
        # the C unpickler reads octal numbers, takes more kinds of buffers, and a state of None
        takes_more = code in (pickle.INT[0], pickle.READONLY_BUFFER[0], pickle.BUILD[0])
        if takes_more and not isinstance(error, IndexError):
            return Damaged("malformed", detail)
        return NotPickled("malformed", detail)

    def _check_size(self) -> None:
        for values, most, word in (
            (self.stack, MOST_STACK, "stacks more than"),
            (self.metastack, MOST_STACK, "sets more marks than"),
            (self.memo, MOST_VALUES, "remembers more values than"),
            (self.names, MOST_NAMES, "refers to more names than"),
        ):
            if len(values) > most:
                raise Damaged("limit", f"the pickle {word} {most:,}")

    def _read(self, count: int) -> bytes:
        if count > 255:
            self.source.check_left(self.file.tell(), count)
            # a text that the file cannot hold is torn, not too long
            if count > LONGEST_TEXT:
                raise Damaged("limit", f"a text of {count:,} bytes at byte {self.file.tell():,}")
        data: bytes = self.file.read(count)
        self.check_frame(count)
        return data

    def _readline(self) -> bytes:
        line: bytes = self.file.readline(LONGEST_LINE)
        at = self.file.tell()
        # a zero byte in a number is where the C unpickler stops reading
        if not line.endswith(b"\n") or b"\0" in line:
            detail = f"the line before byte {at:,} is longer than {LONGEST_LINE:,} or has zeros"
            raise Damaged("malformed", detail)
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
        found = Global(module, name)
        self.names.setdefault(found, False)
        return found

    def get_extension(self, code: int) -> None:
        # what the code stands for is in the copyreg registry of the program that loads the file
        self.append(self.find_class("copyreg", f"extension {code}"))

    def call(self, what: Any, arguments: Any) -> Any:
        """Return the record of a call; one that is not on the list is noted as such."""
        if isinstance(what, PickledObject):
            detail = "the pickle would call a value that it has built itself; nothing was run"
            raise Damaged("hostile", detail)
        if not isinstance(arguments, tuple) or not isinstance(what, Global):
            detail = f"the pickle calls {type(what).__name__} with {type(arguments).__name__}"
            raise Damaged("malformed", detail)
        if what not in CALLS:
            self.names[what] = True
            return PickledObject(what, arguments)
        try:
            self.check_arguments(what, arguments)
            build = BUILDERS.get(str(what))
            return PickledObject(what, arguments) if build is None else build(self, *arguments)
        except FAULTS as error:
            detail = f"{what} is given arguments it cannot take: {error}"
            raise Damaged("malformed", detail) from None

    def check_arguments(self, what: Global, arguments: tuple[Any, ...]) -> None:
        """Raise ValueError if these are not arguments as the list states them."""
        kinds = CALLS[what]
        for place, value in enumerate(arguments):
            kind = kinds[min(place, len(kinds) - 1)] if kinds else ""
            if place >= len(kinds) and not kind.endswith("*"):
                raise ValueError(f"{len(arguments)} of them")
            if is_kind(value, kind):
                continue
            if kind.startswith("!"):
                if isinstance(value, Global):
                    self.names[value] = True
                detail = f"{what} would call or load {brief(value)}; nothing was run"
                raise Damaged("hostile", detail)
            raise ValueError(f"{brief(value)} is not of the kind {kind}")
        required = [kind for kind in kinds if kind[-1] not in "?*"]
        if len(arguments) < len(required):
            raise ValueError(f"{len(arguments)} of them, at least {len(required)} are needed")

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
                    detail = f"the pickle would set {key[:80]} of an object; nothing was run"
                    raise Damaged("hostile", detail)

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._extend(self.stack[-1], items)

    def _extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, PickledObject) and not is_listed(target.what):
            target.items = target.items or []
            target.items.extend(items)
        elif isinstance(target, PickledBytes):
            raise Damaged("malformed", "bytes are appended to a bytearray")
        # pickle would call `extend` of anything else
        elif type(target) is not list:
            raise TypeError(f"items are appended to a {type(target).__name__}")
        else:
            target.extend(items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, PickledSet):
            raise TypeError(f"members are added to a {type(target).__name__}")
        target.extend(map(self.key, items))

    def load_empty_set(self) -> None:
        self.append(PickledSet())

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(tuple(map(self.key, items)))

    def load_dict(self) -> None:
        found: dict[Any, Any] = {}
        self._set_entries(found, self.pop_mark())
        self.append(found)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_entries(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set_entries(self.stack[-1], items)

    def _set_entries(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("a dict with a key that has no value")
        entries = target
        if isinstance(target, PickledObject):
            if is_listed(target.what) and target.what not in MAPPINGS:
                raise TypeError(f"items are set in {target.what}")
            entries = target.entries = target.entries or {}
        if isinstance(entries, list | PickledBytes):
            raise Damaged("malformed", "items are set in a list or bytearray by their index")
        if not isinstance(entries, dict):
            raise TypeError(f"items are set in a {type(target).__name__}")
        for place in range(0, len(items), 2):
            entries[self.key(items[place])] = items[place + 1]

    def key(self, key: Any) -> Any:
        """Return a key that can be hashed at once: a deep tuple is hashed all the way down."""
        if isinstance(key, list | dict):
            raise TypeError(f"a {type(key).__name__} is the key of a dict")
        parts = [key]
        for part in parts:
            if isinstance(part, tuple):
                self.spend(len(part))
                parts.extend(part)
            elif isinstance(part, PickledObject) and not is_key(part):
                raise Damaged(
                    "hostile",
                    f"the pickle would compare {part.what} with other keys, which can run more "
                    "than that; nothing was run",
                )
        if not isinstance(key, tuple) or all(isinstance(part, PLAIN_KEYS) for part in key):
            return key
        # a record is hashed by its identity
        return PickledObject("key", key)

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
        if count < 0:
            raise ValueError("an integer of a negative size")
        if count > LONGEST_INTEGER:
            is_here = count <= self.source.size - self.file.tell()
            refusal = Damaged if is_here else NotPickled
            raise refusal("limit", f"an integer of {count:,} bytes at byte {self.file.tell():,}")
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
        if self.is_legacy:
            # Read the pickles of an old torch.save and find its storages, which follow them.
            # the third one holds byte order and sizes of the machine that wrote it
            magic, protocol, _, value, keys = [self.load() for _ in range(5)]
            if magic != LEGACY_MAGIC or protocol != 1001 or not isinstance(keys, list):
                raise Damaged("malformed", "its first pickles are not those of torch.save")
            at = self.file.tell()
            for key in keys:
                storage = self.storages.get(key) if isinstance(key, str) else None
                if storage is None or storage.start is not None:
                    detail = f"names {str(key)[:40]!r}, which is unknown or doubled"
                    raise Damaged("malformed", f"its list of storages {detail}")
                count = int.from_bytes(self.source.exactly(at, 8), "little", signed=True)
                if count != storage.elements:
                    detail = f"has {count:,} elements where the pickle says {storage.elements:,}"
                    raise Damaged("torn", f"storage {key} {detail}")
                storage.held = storage.size
                storage.start = self.source.part(at + 8, storage.size).start
                at += 8 + storage.size
            self._refuse_rest(at, "the last storage")
            self._read_nested()
            return value
        found = self.load()
        self._read_nested()
        # torch.load goes on reading if the first value equals its magic number
        self._refuse_rest(self.file.tell(), "the end of the pickle")
        return found

    def _refuse_rest(self, at: int, what: str) -> None:
        left = self.source.size - at
        if left:
            raise Damaged("format", f"{left:,} bytes follow {what}; they were not read")

    def persistent_load(self, pid: Any) -> Any:
        """Parse an id of torch.save: `("storage", type, key, location, elements[, view])`."""
        fields = pid if isinstance(pid, tuple) else ()
        # the old format names the class and the source text of every module
        if len(fields) == 4 and all(map(is_kind, fields, MODULE_ID)):
            return fields[1]
        if len(fields) < 5 or not all(map(is_kind, fields, STORAGE_ID)):
            detail = f"a persistent id that torch.save does not write: {brief(pid)}"
            raise Damaged("malformed", detail)
        _, kind, key, _, elements = fields[:5]
        dtype = STORAGES.get(kind.name)
        if dtype is None or elements < 0:
            detail = f"{brief(kind)} named {brief(key)} with {brief(elements)} elements"
            raise Damaged("malformed", f"a storage of {detail}")
        # `(key, offset, size)` of a view, where newer versions write None or nothing
        if any(view is not None for view in fields[5:6]):
            raise Damaged(
                "format",
                "storages that are views of others (torch before 0.4); save it again with "
                "torch.save",
            )
        return self.storages.setdefault(key, StorageRecord(key, dtype, elements))

    def _read_nested(self) -> None:
        """Read byte strings that torch would load as pickles of their own, used or not."""
        if self.nested and self._depth >= DEEPEST_NESTED:
            raise Damaged("limit", f"pickles are nested more than {DEEPEST_NESTED} deep")
        for raw, storage in self.nested.values():
            if raw.start >= 0:
                self._read_inner(FileSlice(self.source.descriptor, raw.start, raw.size), storage)
                continue
            # protocol 2 encodes bytes: they are only in memory, and a slice needs a file
            with tempfile.TemporaryFile() as copy:
                copy.write(raw.data or b"")
                copy.flush()
                self._read_inner(FileSlice(copy.fileno(), 0, raw.size), storage)
            storage.start = -1

    def _read_inner(self, inner: FileSlice, storage: StorageRecord) -> None:
        reader = PickleReader(inner, self._depth + 1)
        if not reader.is_legacy:
            raise Damaged(
                "format",
                "it holds bytes that torch would load, and that are not an old torch.save; not "
                "followed",
            )
        try:
            value = reader.value()
        finally:
            for name, called in reader.names.items():
                self.names[name] = self.names.get(name, False) or called
        if isinstance(value, StorageRecord):
            storage.dtype = value.dtype
            storage.elements = value.elements
            storage.start = value.start
            storage.held = value.held

    dispatch = dict(_UNPICKLER.dispatch)  # noqa: RUF012


REPLACED = """
    reduce newobj newobj_ex build append appends additems empty_set frozenset dict setitem setitems
    frame long4
"""
"""Opcodes with a `load_` method above; the others push values or take them from stack and memo."""
for _opcode in REPLACED.split():
    _code = getattr(pickle, _opcode.upper())[0]
    PickleReader.dispatch[_code] = getattr(PickleReader, f"load_{_opcode}")
for _code, _width in (
    (pickle.SHORT_BINBYTES, 1),
    (pickle.BINBYTES, 4),
    (pickle.BINBYTES8, 8),
    (pickle.BYTEARRAY8, 8),
):
    PickleReader.dispatch[_code[0]] = _byte_string(_width)

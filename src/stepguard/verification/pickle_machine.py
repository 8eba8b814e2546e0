"""Run a pickle stream on the standard library's `pickle._Unpickler`, with records for everything.

Every way in which an unpickler reaches code is replaced: names are records, calls and states are
checked against the list of `pickle_globals`, items are only put into containers of our own. Every
length is compared with what is left of the file before it is read; stack, memo, number of
operations and work are limited.

What is overridden follows the C unpickler, which is the one that will load the file. Where it
differs from `_Unpickler`, at the ends of frames for instance, the stream is refused.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepguard.verification import limits
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged, NotPickled
from stepguard.verification.pickle_globals import (
    MAPPINGS,
    RECORDS,
    build_value,
    is_key,
    is_listed,
    takes_state,
)
from stepguard.verification.pickle_values import (
    ArrayRecord,
    Global,
    NumpyType,
    PickledBytes,
    PickledObject,
    PickledSet,
)

PLAIN_KEYS = (str, int, float, bool, type(None), bytes, Global, PickledObject)
OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
STRIDE = 1024
"""Operations between two looks at the size of stack and memo."""
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
"""What an opcode of `_Unpickler` raises when it is given something it does not take."""


@dataclass(slots=True)
class PickleReferences:
    """What the pickles of a file refer to."""

    names: dict[Global, bool] = field(default_factory=dict)
    """Every name, and whether the stream uses it in a way that is not on the list."""
    nested: dict[int, PickledBytes] = field(default_factory=dict)
    """Byte strings that torch would load as pickles of their own, by identity."""
    scripted: bool = False
    """A TorchScript archive: it is read by C++, and its classes exist in the archive only."""
    work: int = 0
    """Items that were copied or compared beyond what a single opcode does."""

    def spend(self, count: int) -> None:
        """Count work that the stream can ask for again and again; Damaged if it is too much."""
        self.work += count
        if self.work > limits.MOST_WORK:
            raise Damaged("limit", f"reading it takes more than {limits.MOST_WORK:,} comparisons")


_UNPICKLER: Any = pickle._Unpickler
_STOP: Any = pickle._Stop  # type: ignore[attr-defined]
"""Typeshed knows neither the opcodes of the one nor the other."""


def _byte_string(width: int) -> Callable[[PickleMachine], None]:
    """Make the opcode of a byte string; a long one stays in the file, it may be gigabytes."""

    def load(machine: PickleMachine) -> None:
        count = int.from_bytes(machine.read(width), "little")
        machine.check_left(count)
        start = machine.source.start + machine.file.tell()
        data = None
        if count <= limits.SMALL_BYTES:
            data = machine.file.read(count)
        else:
            machine.file.seek(count, 1)
        machine.check_frame(count)
        machine.append(PickledBytes(start, count, data))

    return load


class PickleMachine(_UNPICKLER):  # type: ignore[misc]
    """One pickle stream; `load` returns its value and leaves the file behind the STOP."""

    def __init__(
        self, source: FileSlice, file: Any, persistent: Callable[[Any], Any], seen: PickleReferences
    ) -> None:
        super().__init__(file)
        self.source = source
        self.file = file
        self.persistent_load = persistent
        self.seen = seen

    def load(self) -> Any:
        """Run the stream; raises Damaged for everything that keeps it from reaching its end."""
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
            for done in range(0, limits.MOST_OPERATIONS, STRIDE):
                for _ in range(min(STRIDE, limits.MOST_OPERATIONS - done)):
                    code = read(1)[0]
                    dispatch[code](self)
                self._check_size()
        except _STOP as stop:
            self._check_size()
            # where the next pickle begins would depend on how much was read ahead
            if self.frame_end > self.file.tell():
                raise Damaged("malformed", "the pickle ends before its last frame") from None
            return stop.value
        except FAULTS as error:
            raise self._damage(code, error) from None
        raise Damaged("limit", f"the pickle has more than {limits.MOST_OPERATIONS:,} operations")

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
            (self.stack, limits.MOST_STACK, "stacks more than"),
            (self.metastack, limits.MOST_STACK, "sets more marks than"),
            (self.memo, limits.MOST_MEMO, "remembers more values than"),
            (self.seen.names, limits.MOST_NAMES, "refers to more names than"),
        ):
            if len(values) > most:
                raise Damaged("limit", f"the pickle {word} {most:,}")

    def _read(self, count: int) -> bytes:
        if count > 255:
            self.check_left(count)
            # a text that the file cannot hold is torn, not too long
            if count > limits.LONGEST_TEXT:
                raise Damaged("limit", f"a text of {count:,} bytes at byte {self.file.tell():,}")
        data: bytes = self.file.read(count)
        self.check_frame(count)
        return data

    def _readline(self) -> bytes:
        line: bytes = self.file.readline(limits.LONGEST_LINE)
        if not line.endswith(b"\n"):
            at = self.file.tell() - len(line)
            raise Damaged(
                "malformed",
                f"a line at byte {at:,} has no end within {limits.LONGEST_LINE:,} bytes",
            )
        # in a number it is where the C unpickler stops reading
        if b"\0" in line:
            raise Damaged("malformed", f"a line with a zero byte ends at {self.file.tell():,}")
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

    def check_left(self, count: int) -> None:
        at = self.file.tell()
        if count > self.source.size - at:
            raise Damaged(
                "torn",
                f"ends at byte {self.source.size:,} where {count:,} more are declared at {at:,}",
            )

    def find_class(self, module: str, name: str) -> Global:
        """Return the record of a name, under the module that Python 3 has for it."""
        if self.proto < 3:
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[module, name]
            else:
                module = IMPORT_MAPPING.get(module, module)
        found = Global(module, name)
        self.seen.names.setdefault(found, False)
        return found

    def get_extension(self, code: int) -> None:
        # what the code stands for is in the copyreg registry of the program that loads the file
        self.append(self.find_class("copyreg", f"extension {code}"))

    def call(self, what: Any, arguments: Any) -> Any:
        """Return the record of a call; one that is not on the list is noted as such."""
        if isinstance(what, PickledObject):
            raise Damaged(
                "hostile",
                "the pickle would call a value that it has built itself; nothing was run",
            )
        if not isinstance(arguments, tuple) or not isinstance(what, Global):
            raise Damaged(
                "malformed",
                f"the pickle calls {type(what).__name__} with {type(arguments).__name__}",
            )
        return build_value(self, what, arguments)

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.append(self.call(klass, tuple(args)))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._new(self.stack[-1], arguments)

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError(f"an object is made with a {type(arguments).__name__} of arguments")
        self.stack[-1] = self._new(self.stack[-1], (*arguments, keywords))

    def _new(self, what: Any, arguments: Any) -> Any:
        """Return the record of `cls.__new__(cls, *arguments)`, which runs no constructor."""
        is_record = isinstance(what, Global) and (what in RECORDS or not is_listed(what))
        return PickledObject(what) if is_record and arguments == () else self.call(what, arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        # pickle would write into the attributes of the imported thing, shared by the whole process
        if isinstance(target, Global):
            raise Damaged(
                "hostile",
                f"the pickle would change {target} itself, for the whole program; nothing was run",
            )
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
            self.seen.spend(len(part))
            for key in part:
                if isinstance(key, str) and key.startswith("__") and key.endswith("__"):
                    raise Damaged(
                        "hostile", f"the pickle would set {key[:80]} of an object; nothing was run"
                    )

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._extend(self.stack[-1], items)

    def _extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, PickledObject) and not is_listed(target.what):
            if not target.items:
                target.items = []
            target.items.extend(items)
            return
        if isinstance(target, PickledBytes):
            raise Damaged("malformed", "bytes are appended to a bytearray")
        # pickle would call `extend` of anything else
        if type(target) is not list:
            raise TypeError(f"items are appended to a {type(target).__name__}")
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
            if not target.entries:
                target.entries = {}
            entries = target.entries
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
                self.seen.spend(len(part))
                parts.extend(part)
            elif isinstance(part, PickledObject) and not is_key(part):
                raise Damaged(
                    "hostile",
                    f"the pickle would compare {part.what} with other keys, which can run more "
                    "than that; nothing was run",
                )
        if not isinstance(key, tuple):
            return key
        if all(isinstance(part, PLAIN_KEYS) for part in key):
            return key
        # a record is hashed by its identity
        return PickledObject("key", key)

    def load_frame(self) -> None:
        count = int.from_bytes(self.read(8), "little")
        # a frame longer than the file was cut off or forged
        self.check_left(count)
        at = self.file.tell()
        if at < self.frame_end:
            raise Damaged("malformed", f"a frame begins inside another one at byte {at:,}")
        self.frame_end = at + count

    def load_long4(self) -> None:
        count = int.from_bytes(self.read(4), "little", signed=True)
        if count < 0:
            raise ValueError("an integer of a negative size")
        if count > limits.LONGEST_INTEGER:
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

    dispatch = {  # noqa: RUF012
        **_UNPICKLER.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.ADDITEMS[0]: load_additems,
        pickle.EMPTY_SET[0]: load_empty_set,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.FRAME[0]: load_frame,
        pickle.LONG4[0]: load_long4,
        pickle.SHORT_BINBYTES[0]: _byte_string(1),
        pickle.BINBYTES[0]: _byte_string(4),
        pickle.BINBYTES8[0]: _byte_string(8),
        pickle.BYTEARRAY8[0]: _byte_string(8),
    }

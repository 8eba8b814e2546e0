"""Run a pickle stream on the standard library's `pickle._Unpickler`, with records for everything.

Every way in which an unpickler reaches code is replaced: names are records, calls and states are
checked against the list of `pickle_globals`, items are only put into containers of our own. Every
length is compared with what is left of the file before it is read; stack, memo, number of
operations and work are limited.

What is overridden follows the C unpickler, which is the one that will load the file. Where it
differs from `_Unpickler`, at the ends of frames for instance, the stream is refused.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
import struct
import tempfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from stepguard.records.checks import Role
from stepguard.verification import bounded_file
from stepguard.verification.bounded_file import Damaged, FileSlice, NotPickled, ProblemList
from stepguard.verification.pickle_globals import (
    MAPPINGS,
    RECORDS,
    ArrayRecord,
    Global,
    NumpyType,
    PickledBytes,
    PickledObject,
    PickledSet,
    StorageRecord,
    TensorRecord,
    build_value,
    is_key,
    is_listed,
    storage_of,
    takes_state,
)

# --- Run a pickle stream on the standard library's `pickle._Unpickler`, with records for
# everything.


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
        if self.work > bounded_file.MOST_WORK:
            raise Damaged(
                "limit", f"reading it takes more than {bounded_file.MOST_WORK:,} comparisons"
            )


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
        if count <= bounded_file.SMALL_BYTES:
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
            for done in range(0, bounded_file.MOST_OPERATIONS, STRIDE):
                for _ in range(min(STRIDE, bounded_file.MOST_OPERATIONS - done)):
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
        raise Damaged(
            "limit", f"the pickle has more than {bounded_file.MOST_OPERATIONS:,} operations"
        )

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
            (self.stack, bounded_file.MOST_STACK, "stacks more than"),
            (self.metastack, bounded_file.MOST_STACK, "sets more marks than"),
            (self.memo, bounded_file.MOST_MEMO, "remembers more values than"),
            (self.seen.names, bounded_file.MOST_NAMES, "refers to more names than"),
        ):
            if len(values) > most:
                raise Damaged("limit", f"the pickle {word} {most:,}")

    def _read(self, count: int) -> bytes:
        if count > 255:
            self.check_left(count)
            # a text that the file cannot hold is torn, not too long
            if count > bounded_file.LONGEST_TEXT:
                raise Damaged("limit", f"a text of {count:,} bytes at byte {self.file.tell():,}")
        data: bytes = self.file.read(count)
        self.check_frame(count)
        return data

    def _readline(self) -> bytes:
        line: bytes = self.file.readline(bounded_file.LONGEST_LINE)
        if not line.endswith(b"\n"):
            at = self.file.tell() - len(line)
            raise Damaged(
                "malformed",
                f"a line at byte {at:,} has no end within {bounded_file.LONGEST_LINE:,} bytes",
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
        if count > bounded_file.LONGEST_INTEGER:
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


# --- Read a whole pickle: one stream, or the five pickles and raw storages of torch.save before
# 1.6.


LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the old format: the magic number, in protocol 2."""
DEEPEST_NESTED = 3


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where the bytes of a storage lie in the file."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LegacyStream:
    """The value of an old torch.save, and where its storages lie."""

    value: Any
    storages: dict[str, ByteRange]


class PickleReader:
    """Reads the pickles of one file, and those that they hold as byte strings."""

    def __init__(self, source: FileSlice, *, scripted: bool = False, depth: int = 0) -> None:
        self._source = source
        self._file = source.reader()
        self._depth = depth
        self.storages: dict[str, StorageRecord] = {}
        """Every storage that the pickles name, used or not."""
        self.seen = PickleReferences(scripted=scripted)
        self.nested: dict[int, LegacyStream] = {}
        """Pickles inside the pickle, by the identity of their bytes."""

    def value(self) -> Any:
        """Return the value of a file that is one pickle."""
        found = self._next()
        self._read_nested()
        # torch.load goes on reading if the first value equals its magic number
        left = self._source.size - self._file.tell()
        if left:
            raise Damaged(
                "format", f"{left:,} bytes follow the end of the pickle; they were not read"
            )
        return found

    def legacy(self) -> LegacyStream:
        """Read the pickles of an old torch.save and find its storages, which follow them."""
        magic = self._next()
        protocol = self._next()
        self._next()  # byte order and sizes of the machine that wrote it
        value = self._next()
        keys = self._next()
        if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not isinstance(keys, list):
            raise Damaged("malformed", "its first pickles are not those of torch.save")
        ranges = self._storage_ranges(keys)
        self._read_nested()
        return LegacyStream(value, ranges)

    def _next(self) -> Any:
        return PickleMachine(self._source, self._file, self._persistent, self.seen).load()

    def _persistent(self, pid: Any) -> Any:
        # the old format names the class and the source text of every module
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            _, kind, file, text = pid
            if (
                isinstance(kind, Global)
                and isinstance(file, str | None)
                and isinstance(text, str | None)
            ):
                return kind
        storage = storage_of(pid)
        return self.storages.setdefault(storage.key, storage)

    def _storage_ranges(self, keys: list[Any]) -> dict[str, ByteRange]:
        ranges: dict[str, ByteRange] = {}
        at = self._file.tell()
        for key in keys:
            storage = self.storages.get(key) if isinstance(key, str) else None
            if storage is None or key in ranges:
                raise Damaged(
                    "malformed",
                    f"its list of storages names {str(key)[:40]!r}, which is unknown or doubled",
                )
            count = int.from_bytes(self._source.exactly(at, 8), "little", signed=True)
            if count != storage.elements:
                raise Damaged(
                    "torn",
                    f"storage {key} has {count:,} elements where the pickle says "
                    f"{storage.elements:,}",
                )
            size = count * bounded_file.SIZES[storage.dtype]
            self._source.part(at + 8, size)
            ranges[key] = ByteRange(self._source.start + at + 8, size)
            at += 8 + size
        if at < self._source.size:
            left = self._source.size - at
            raise Damaged("format", f"{left:,} bytes follow the last storage; they were not read")
        return ranges

    def _read_nested(self) -> None:
        """Read byte strings that torch would load as pickles of their own, used or not."""
        if self.seen.nested and self._depth >= DEEPEST_NESTED:
            raise Damaged("limit", f"pickles are nested more than {DEEPEST_NESTED} deep")
        for raw in self.seen.nested.values():
            with _slice_of(self._source, raw) as inner:
                if not is_legacy(inner):
                    raise Damaged(
                        "format",
                        "it holds bytes that torch would load, and that are not an old "
                        "torch.save; not followed",
                    )
                reader = PickleReader(inner, depth=self._depth + 1)
                try:
                    self.nested[id(raw)] = reader.legacy()
                finally:
                    for name, called in reader.seen.names.items():
                        self.seen.names[name] = self.seen.names.get(name, False) or called


def is_legacy(source: FileSlice) -> bool:
    return source.at(0, len(LEGACY_START)) == LEGACY_START


@contextmanager
def _slice_of(source: FileSlice, raw: PickledBytes) -> Iterator[FileSlice]:
    """Open a byte string where it lies in the file, or a copy of one that protocol 2 encoded."""
    # a FileSlice reads by descriptor, so bytes that are only in memory need a file of their own
    if raw.data is None or raw.start >= 0:
        yield FileSlice(source.descriptor, raw.start, raw.size, source.path)
        return
    with tempfile.TemporaryFile() as copy:
        copy.write(raw.data)
        copy.flush()
        yield FileSlice(copy.fileno(), 0, raw.size, source.path)


# --- The role of a stored value (parameter, buffer, optimizer, ...), by structure, then by name.


_WORDS: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("scaler", re.compile(r"(^|[_:.])(grad|amp|loss)?_?scaler(s|_state|_state_dict)?$|^amp$")),
    ("scheduler", re.compile(r"sched")),
    ("ema", re.compile(r"(^|[_:.])ema([_.]|$)|^shadow(_params)?$|^averaged_model$|(^|_)swa(_|$)")),
    ("optimizer", re.compile(r"optimizer|(^|[_:.])optim(s|_|\.|$)|^opts?(_[a-z]+)?$")),
    (
        "rng",
        re.compile(
            r"(^|[_:.])rng([_.]|$)|random_state|random_number"
            r"|^(numpy|python|torch|cuda)_random|^rngs?$"
        ),
    ),
    (
        "other",
        re.compile(
            r"^(callbacks?|loops|hyper_parameters|hparams.*|config|cfg|args|metrics?|history"
            r"|losses|loss|sampler.*|best_.*|results?|meta(data)?|train_state|data_?loader.*"
            r"|tokenizer)$"
        ),
    ),
)
_FILES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"^(optimizer|optim)|optim_states|_optimizer\.")),
    ("scheduler", re.compile(r"^(lr_)?scheduler")),
    ("scaler", re.compile(r"^(grad_)?scaler")),
    ("rng", re.compile(r"^(rng_state|random_states?|rng)")),
    ("ema", re.compile(r"(^|[_-])ema([_.-]|$)")),
    ("other", re.compile(r"^(training_args|sampler|dl_state|loader|args)")),
)
BUFFERS = re.compile(
    r"(^|[_./])(running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|masked_bias|mask|attn_mask|causal_mask|attn_bias|alibi"
    r"|min_val|max_val|relative_position_index|freqs_cis|cos_cached|sin_cached"
    r"|alphas_cumprod\w*|betas|cached_\w+|pos_ids|observer_enabled|fake_quant_enabled)$"
)
NORM_STATISTICS = re.compile(r"(^|[_./])running_(mean|var)$")
SQUARES = re.compile(
    r"^(max_)?exp_avg_sq(_row|_col)?$|^square_avg$|^acc_delta$|^running_var$|\brunning_var$"
)
"""Sums of squares: never negative."""
USUALLY_ZERO = re.compile(
    r"lora_b|lora_embedding_b|zero|adaln|modulation|gate|gamma|alpha|proj_out|out_proj|c_proj"
    r"|o_proj|to_out|down_proj|fc2|linear2|conv2|conv3|wo\b|out_layers|final|head|bias|pad|mask"
    r"|cache|residual|scale",
    re.IGNORECASE,
)
"""Weights that many recipes start at zero."""


def structural(value: dict[Any, Any]) -> Role | None:
    """Tell the state of an optimizer, scheduler or scaler by its keys."""
    if "param_groups" in value and "state" in value:
        return "optimizer"
    is_schedule = any(key in value for key in ("_step_count", "base_lrs", "_last_lr"))
    if "last_epoch" in value and is_schedule:
        return "scheduler"
    if "growth_factor" in value and "backoff_factor" in value:
        return "scaler"
    return None


def named(key: Any) -> Role | None:
    """Tell by the name of an entry; of a dotted name the first part counts (`model_ema.weight`)."""
    if not isinstance(key, str) or not key:
        return None
    return _first_match(_WORDS, key[:100].lower().partition(".")[0])


def of_file(name: str) -> Role | None:
    """Tell by the name of the file, for formats that spread a state over several."""
    return _first_match(_FILES, name.lower())


def of_tensor(context: Role | None, name: str, dtype: str, *, parameter: bool = False) -> Role:
    """Return the role of one tensor below a context (None: part of a model)."""
    if context is not None:
        return context
    if parameter:
        return "parameter"
    if "/_buffers/" in f"/{name}" or BUFFERS.search(name) or not bounded_file.is_real(dtype):
        return "buffer"
    return "parameter"


def slot(name: str) -> str:
    """Return the last part of a name: `exp_avg_sq` of `optimizer/layer.weight/exp_avg_sq`."""
    return re.split(r"[/.]", name)[-1]


def _first_match(table: tuple[tuple[Role, re.Pattern[str]], ...], text: str) -> Role | None:
    for role, pattern in table:
        if pattern.search(text):
            return role
    return None


# --- Walk the value of a pickle: tensors with name and role, non-finite numbers, learning rates.


RateKind = Literal["lr", "initial_lr", "max_lr", "base_lr", "last_lr"]
RATES: dict[str, RateKind] = {
    "lr": "lr",
    "initial_lr": "initial_lr",
    "max_lr": "max_lr",
    "base_lrs": "base_lr",
    "_last_lr": "last_lr",
}
"""Keys of optimizer and scheduler states -> what kind of learning rate stands there."""
STEPS = ("global_step", "step", "iteration", "iter", "num_steps", "steps")
UNNAMED = frozenset({"_modules", "_parameters"})
"""Keys of a pickled module that are left out of names. `_buffers` stays: it tells the role."""


@dataclass(frozen=True, slots=True)
class ValuePath:
    """Where a value stands. Linked upward, so that names are built only where they are needed."""

    above: ValuePath | None
    key: Any
    depth: int
    role: Role | None

    def name(self) -> str:
        parts = []
        path = self
        while path.above is not None:
            if path.key is not None and path.key not in UNNAMED:
                parts.append(_word(path.key))
            path = path.above
        return "/".join(reversed(parts))


def _word(key: Any) -> str:
    if isinstance(key, str | int):
        return str(key)
    return type(key).__name__


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """One tensor of a pickle, by name and role."""

    name: str
    role: Role
    record: TensorRecord | ArrayRecord | StorageRecord


@dataclass(slots=True)
class PickleContents:
    """What verification needs to know of a pickle."""

    tensors: list[PickledTensor] = field(default_factory=list)
    numbers: list[tuple[str, Role, float]] = field(default_factory=list)
    """Python floats that are NaN or infinite."""
    rates: list[tuple[str, RateKind, float]] = field(default_factory=list)
    step: int | None = None
    root: Any = None


def walk(root: Any, problems: ProblemList, role: Role | None = None) -> PickleContents:
    """Visit every value, each container once, to a limited depth and number."""
    found = PickleContents(root=root)
    seen: set[int] = set()
    if role is None and isinstance(root, dict):
        role = structural(root)
    # a list instead of recursion: the file decides how deep its containers are
    todo: list[tuple[ValuePath, Any]] = [(ValuePath(None, None, 0, role), root)]
    has_parts = _has_parts(root)
    visited = 0
    while todo:
        path, value = todo.pop()
        visited += 1
        if visited > bounded_file.MOST_NODES or len(found.tensors) > bounded_file.MOST_TENSORS:
            problems.add(
                "limit",
                f"holds more than {bounded_file.MOST_NODES:,} values; the rest was not read",
            )
            break
        if not isinstance(value, dict | list | tuple | PickledObject):
            _take(found, path, value, has_parts)
        elif id(value) not in seen:
            # a pickle can put a list into itself
            seen.add(id(value))
            todo.extend(_below(path, value, problems))
    found.tensors.reverse()
    return found


def _has_parts(root: Any) -> bool:
    """Tell a checkpoint of several parts from a state dict, whose tensors are all the model's."""
    return isinstance(root, dict) and any(isinstance(value, dict) for value in root.values())


def _below(path: ValuePath, value: Any, problems: ProblemList) -> list[tuple[ValuePath, Any]]:
    if path.depth >= bounded_file.MOST_DEPTH:
        problems.add(
            "limit",
            f"values are nested more than {bounded_file.MOST_DEPTH} deep; the rest was not read",
        )
        return []
    below = []
    for key, child in _children(value):
        if not isinstance(child, str | bytes | None):
            role = path.role or _role_of_part(path, key, child)
            below.append((ValuePath(path, key, path.depth + 1, role), child))
    return below


def _role_of_part(above: ValuePath, key: Any, child: Any) -> Role | None:
    if isinstance(child, dict):
        role = structural(child)
        if role is not None:
            return role
    if _may_name_a_part(above, key, child):
        return named(key)
    return None


def _may_name_a_part(above: ValuePath, key: Any, child: Any) -> bool:
    """Names divide a checkpoint only near the top; further down they are the model's own."""
    if isinstance(child, TensorRecord):
        role = named(key)
        return role == "ema" or (role == "rng" and child.dtype in ("uint8", ""))
    return above.depth == 0 or (above.depth == 1 and isinstance(child, dict | list | PickledObject))


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, PickledObject):
        yield from _children_of_object(value)
    else:
        yield from enumerate(value)


def _children_of_object(value: PickledObject) -> Iterator[tuple[Any, Any]]:
    yield from enumerate(value.arguments)
    for state in value.states():
        if isinstance(state, dict):
            yield from state.items()
        else:
            yield None, state
    yield from enumerate(value.items)
    yield from value.entries.items()


def _take(found: PickleContents, path: ValuePath, value: Any, has_parts: bool) -> None:
    if isinstance(value, TensorRecord | ArrayRecord | StorageRecord):
        _take_tensor(found, path, value, has_parts)
    elif isinstance(value, float):
        _take_number(found, path, value)
    elif type(value) is int:
        _take_step(found, path, value)


def _take_tensor(
    found: PickleContents,
    path: ValuePath,
    record: TensorRecord | ArrayRecord | StorageRecord,
    has_parts: bool,
) -> None:
    name = path.name()
    context = path.role
    if context is None and path.depth == 1 and has_parts:
        context = "other"
    parameter = isinstance(record, TensorRecord) and record.parameter
    role = of_tensor(context, name, record.dtype, parameter=parameter)
    found.tensors.append(PickledTensor(name, role, record))


def _take_step(found: PickleContents, path: ValuePath, value: int) -> None:
    if path.depth == 1 and path.key in STEPS and found.step is None and value >= 0:
        found.step = value


def _take_number(found: PickleContents, path: ValuePath, value: float) -> None:
    if not math.isfinite(value):
        found.numbers.append((path.name(), path.role or "other", value))
        return
    if path.role not in ("optimizer", "scheduler"):
        return
    key = path.key
    # schedulers keep lists of rates: then the name stands above the index
    if not isinstance(key, str) and path.above is not None:
        key = path.above.key
    if isinstance(key, str) and key in RATES:
        found.rates.append((path.name(), RATES[key], value))

"""One untrusted file: bounded reads, what it holds, and what is wrong with its bytes and values.

Every byte is read once, and nothing of it is executed.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from stepguard.records.checks import Problem, ProblemKind, Rate, Role, Weight

try:
    # the same function as zlib's, three times as fast
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

# --- Element types by their torch names.

_NAMES = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2 complex128 complex64 complex32 int64 int32 int16 int8 bool
    uint64 uint32 uint16 uint8 qint8 quint8 qint32 quint4x2 quint2x4
"""
SIZES: dict[str, int] = {
    name: getattr(torch, name).itemsize for name in _NAMES.split() if hasattr(torch, name)
}
"""Bytes of one element, of those types that this torch has."""


def table(text: str) -> dict[str, str]:
    """Parse words of `name=torch_name`."""
    return dict(word.split("=") for word in text.split())


ALIASES = table(
    "float=float32 double=float64 half=float16 long=int64 int=int32 short=int16 "
    "cfloat=complex64 cdouble=complex128 chalf=complex32"
)
STORAGES = table(
    """
    FloatStorage=float32 DoubleStorage=float64 HalfStorage=float16 BFloat16Storage=bfloat16
    LongStorage=int64 IntStorage=int32 ShortStorage=int16 CharStorage=int8 ByteStorage=uint8
    BoolStorage=bool UntypedStorage=uint8 ComplexFloatStorage=complex64
    ComplexDoubleStorage=complex128 QInt8Storage=qint8 QUInt8Storage=quint8 QInt32Storage=qint32
    QUInt4x2Storage=quint4x2 QUInt2x4Storage=quint2x4
    """
)
SAFETENSORS = table(
    """
    F64=float64 F32=float32 F16=float16 BF16=bfloat16 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2
    F8_E8M0=float8_e8m0fnu F8_E4M3FNUZ=float8_e4m3fnuz F8_E5M2FNUZ=float8_e5m2fnuz C64=complex64
    I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 U16=uint16 U8=uint8 BOOL=bool
    """
)
SAFETENSORS_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of types that are packed below a byte: their size is checked, their values are not."""
NUMPY = table(
    """
    f8=float64 f4=float32 f2=float16 c16=complex128 c8=complex64 i8=int64 i4=int32 i2=int16 i1=int8
    u8=uint64 u4=uint32 u2=uint16 u1=uint8 b1=bool
    """
)


def is_real(dtype: str) -> bool:
    """Can an element be NaN or infinite?"""
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float4_e2m1fn_x2"


def is_shape(value: object) -> bool:
    """Could these be the sizes or strides of a tensor? Only then may they be multiplied."""
    if not isinstance(value, tuple | list) or len(value) > 64:
        return False
    # Python integers have no end, and one of more than 4300 digits cannot even be printed
    return all(type(n) is int and abs(n) <= 1 << 63 for n in value)


# --- Files.

LARGEST_INDEX = 32 << 20
"""Bytes of a zip directory, a safetensors header or a JSON file: about 300 000 tensors."""
FILE_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class Damaged(Exception):  # noqa: N818 (an outcome of reading, not a fault of ours)
    """Reading cannot continue; carries the kind of problem and a sentence."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def clean(text: str, longest: int) -> str:
    """Replace unprintable characters and shorten: text from a file must not control a terminal."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    if len(shown) > longest:
        return shown[: longest - 3] + "..."
    return shown


class FileSlice(io.RawIOBase):
    """`size` bytes of an open file from `start` on, read exactly or not at all."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.start = start
        self.size = size
        self._position = 0

    def part(self, start: int, size: int) -> FileSlice:
        """Return a slice of this slice; it must lie inside."""
        if start < 0 or size < 0 or start + size > self.size:
            raise Damaged(
                "torn",
                f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}",
            )
        return FileSlice(self.descriptor, self.start + start, size)

    def at(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes at `position`."""
        return self.exactly(position, max(0, min(size, self.size - position)))

    def exactly(self, position: int, size: int) -> bytes:
        """Return `size` bytes at `position`, or raise Damaged before memory is taken for them."""
        self.check_left(position, size)
        data = bytearray(size)
        self.fill(memoryview(data), position)
        return bytes(data)

    def check_left(self, position: int, size: int) -> None:
        """Raise Damaged if fewer than `size` bytes follow `position`."""
        if size > self.size - position:
            raise Damaged(
                "torn",
                f"ends at byte {self.size:,} where {size:,} more are declared at {position:,}",
            )

    def fill(self, view: memoryview, position: int) -> None:
        """Read as much as the view holds; Damaged if the file became shorter in the meantime."""
        filled = 0
        # one call returns at most 2 GB on Linux, and less after a signal
        while filled < len(view):
            at = self.start + position + filled
            try:
                count = os.preadv(self.descriptor, [view[filled:]], at)
            except OSError as error:
                raise Damaged(
                    "unreadable", f"cannot be read at byte {at:,}: {error.strerror}"
                ) from error
            if not count:
                raise Damaged("torn", f"ends at byte {at:,}: it became shorter while it was read")
            filled += count

    def reader(self) -> io.BufferedReader:
        """Return a buffered file object of the slice."""
        return io.BufferedReader(self.part(0, self.size), 1 << 18)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def open_file(path: Path) -> Iterator[FileSlice]:
    """Open a regular file as a slice of its whole length; anything else is refused unopened."""
    descriptor = -1
    try:
        facts = path.stat()
        if stat.S_ISREG(facts.st_mode):
            # without O_NONBLOCK, opening a FIFO that has no writer would wait forever
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            # the path may have been replaced since
            facts = os.fstat(descriptor)
    except OSError as error:
        raise Damaged("unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(facts.st_mode):
            kind = FILE_KINDS.get(stat.S_IFMT(facts.st_mode), "something else")
            raise Damaged("unreadable", f"is {kind}, not a file")
        yield FileSlice(descriptor, 0, facts.st_size)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON strictly about doubled keys; NaN is accepted, trainer_state.json holds it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            doubled = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise Damaged("duplicate", f"{what} names {doubled[:80]!r} more than once")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise Damaged("limit", f"{what} is nested too deep") from None
    except ValueError as error:
        raise Damaged("malformed", f"{what} is not JSON: {str(error)[:120]}") from None


# --- Roles, by structure first and by name second.

_PARTS: dict[Role, str] = {
    "scaler": r"(^|[_:.])(grad|amp|loss)?_?scaler(s|_state|_state_dict)?$|^amp$",
    "scheduler": r"sched",
    "ema": r"(^|[_:.])ema([_.]|$)|^shadow(_params)?$|^averaged_model$|(^|_)swa(_|$)",
    "optimizer": r"optimizer|(^|[_:.])optim(s|_|\.|$)|^opts?(_[a-z]+)?$",
    "rng": r"(^|[_:.])rng([_.]|$)|random_state|random_number"
    r"|^(numpy|python|torch|cuda)_random|^rngs?$",
    "other": r"^(callbacks?|loops|hyper_parameters|hparams.*|config|cfg|args|metrics?|history"
    r"|losses|loss|sampler.*|best_.*|results?|meta(data)?|train_state|data_?loader.*|tokenizer)$",
}
_FILES: dict[Role, str] = {
    "optimizer": r"^(optimizer|optim)|optim_states|_optimizer\.",
    "scheduler": r"^(lr_)?scheduler",
    "scaler": r"^(grad_)?scaler",
    "rng": r"^(rng_state|random_states?|rng)",
    "ema": r"(^|[_-])ema([_.-]|$)",
    "other": r"^(training_args|sampler|dl_state|loader|args)",
}
BUFFERS = re.compile(
    r"(^|[_./])(running_mean|running_var|num_batches_tracked|inv_freq|original_inv_freq"
    r"|position_ids|token_type_ids|masked_bias|mask|attn_mask|causal_mask|attn_bias|alibi"
    r"|min_val|max_val|relative_position_index|freqs_cis|cos_cached|sin_cached"
    r"|alphas_cumprod\w*|betas|cached_\w+|pos_ids|observer_enabled|fake_quant_enabled)$"
)
NORM_STATISTICS = re.compile(r"(^|[_./])running_(mean|var)$")
SQUARES = re.compile(
    r"(^|[/.])((max_)?exp_avg_sq(_row|_col)?|square_avg|acc_delta)$|\brunning_var$"
)
"""Sums of squares: never negative."""
USUALLY_ZERO = re.compile(
    r"lora_b|lora_embedding_b|zero|adaln|modulation|gate|gamma|alpha|proj_out|out_proj|c_proj"
    r"|o_proj|to_out|down_proj|fc2|linear2|conv2|conv3|wo\b|out_layers|final|head|bias|pad|mask"
    r"|cache|residual|scale",
    re.IGNORECASE,
)
"""Weights that many recipes start at zero."""


def structural(value: Any) -> Role | None:
    """Recognise the state of an optimizer, scheduler or scaler by its keys."""
    if not isinstance(value, dict):
        return None
    if "param_groups" in value and "state" in value:
        return "optimizer"
    is_schedule = any(key in value for key in ("_step_count", "base_lrs", "_last_lr"))
    if "last_epoch" in value and is_schedule:
        return "scheduler"
    if "growth_factor" in value and "backoff_factor" in value:
        return "scaler"
    return None


def role_of_part(key: Any) -> Role | None:
    """Return the role of an entry by its name: of `model_ema.weight` the first part counts."""
    if not isinstance(key, str) or not key:
        return None
    return _first_match(_PARTS, key[:100].lower().partition(".")[0])


def role_of_file(name: str) -> Role | None:
    """Return the role by the name of the file, for formats that spread a state over several."""
    return _first_match(_FILES, name.lower())


def _first_match(table: dict[Role, str], text: str) -> Role | None:
    for role, pattern in table.items():
        if re.search(pattern, text):
            return role
    return None


def role_of_tensor(context: Role | None, name: str, dtype: str, *, parameter: bool = False) -> Role:
    """Return the role of one tensor below a context (None: part of a model)."""
    if context is not None:
        return context
    if parameter:
        return "parameter"
    if "/_buffers/" in f"/{name}" or BUFFERS.search(name) or not is_real(dtype):
        return "buffer"
    return "parameter"


# --- What a file holds, and one pass over its bytes.

Progress = Callable[[int], None]
"""Takes the number of bytes that were read since the last call."""
MOST_PER_KIND = 20
"""Problems of one kind that are listed for one file; the others are counted in one line."""
PIECE = 1 << 19
"""Bytes read at once: small enough to stay in the cache of the processor until they are measured.

Cuts lie at multiples of 16 bytes, the widest element, from the start of a storage.
"""
RUN = 16 << 20
"""Bytes after which another thread may begin."""
WORKERS = min(4, os.cpu_count() or 1)
OVERLAP = 4
"""How many times the bytes of a storage may be measured for tensors that share it."""
WIDENED = frozenset(
    ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
"""Types for which torch has no aminmax; they are converted to float32."""
PARTS = {"complex128": torch.float64, "complex64": torch.float32, "complex32": torch.float16}
"""Complex numbers are read as pairs of these."""


@dataclass(slots=True, eq=False)
class Values:
    """Bytes of one element type that are measured once, however many tensors share them."""

    start: int
    size: int
    dtype: str
    base: int
    """From where elements are counted: the start of the storage."""
    count: int = 0
    nan: int = 0
    positive: int = 0
    """How many are +Inf."""
    negative: int = 0
    """How many are -Inf."""
    low: float = math.inf
    """Least of the finite values."""
    high: float = -math.inf
    first: int | None = None
    """Element number of the first value that is not finite."""

    @property
    def bad(self) -> int:
        return self.nan + self.positive + self.negative

    @property
    def counted(self) -> str:
        """`2 NaN, 1 -Inf of 64`."""
        counts = {"NaN": self.nan, "+Inf": self.positive, "-Inf": self.negative}
        words = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
        return f"{words} of {self.count:,}"

    @property
    def finite(self) -> str:
        """From the least to the largest of the finite ones; empty where there is none."""
        if self.low > self.high:
            return ""
        return f"; finite from {self.low:.4g} to {self.high:.4g}"

    def update(self, memory: bytearray, offset: int, size: int) -> None:
        """Measure the next part of the bytes."""
        real = PARTS.get(self.dtype) or getattr(torch, self.dtype)
        values = torch.frombuffer(memory, dtype=real, count=size // real.itemsize, offset=offset)
        if self.dtype in WIDENED:
            values = values.float()
        parts = 2 if self.dtype in PARTS else 1
        # aminmax returns NaN if any value is NaN, so finite bounds prove that all values are finite
        low, high = map(float, torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = ~torch.isfinite(values)
            self.nan += int(torch.isnan(values).sum())
            self.positive += int(torch.isposinf(values).sum())
            self.negative += int(torch.isneginf(values).sum())
            if self.first is None:
                # argmax is not defined for bool
                self.first = self.count + int(bad.to(torch.uint8).argmax()) // parts
            low = math.inf
            high = -math.inf
            if not bad.all():
                low, high = map(float, torch.aminmax(values[~bad]))
        self.count += values.numel() // parts
        self.low = min(self.low, low)
        self.high = max(self.high, high)


@dataclass(slots=True, eq=False)
class Checksum:
    """A range of the file with its stored checksum: a CRC-32 as a number, an XXH3-128 as text."""

    start: int
    size: int
    label: str
    expected: int | str
    tensor: str | None = None
    _crc: int = 0
    _hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def update(self, memory: bytearray, offset: int, size: int) -> None:
        view = memoryview(memory)[offset : offset + size]
        if isinstance(self.expected, int):
            self._crc = crc32(view, self._crc)
        else:
            self._hash.update(view)

    def compare(self, layout: FileLayout) -> None:
        """Report bytes that have changed."""
        numbers = f"digest is {self._hash.hexdigest()}, it was written with {self.expected}"
        changed = self._hash.hexdigest() != self.expected
        if isinstance(self.expected, int):
            numbers = f"CRC is {self._crc:08x}, it was written with {self.expected:08x}"
            changed = self._crc != self.expected
        if changed:
            detail = f"{self.label}: its {numbers}: bytes have changed"
            layout.add("checksum", detail, tensor=self.tensor)


@dataclass(slots=True, eq=False)
class StoredTensor:
    """One tensor of a file, and its values (None for integers and empty tensors)."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    values: Values | None = None


class FileLayout:
    """One file, or a folder itself: parsed by a format reader, then measured by the scan."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = "unknown"
        self.size = 0
        self.tensors: list[StoredTensor] = []
        self.checksums: list[Checksum] = []
        self.rates: list[Rate] = []
        self.step: int | None = None
        self.numbers: list[tuple[str, Role, float]] = []
        """Python floats that are NaN or infinite."""
        self.complete = False
        """The reader reached the end of the file: a tensor that is not listed is not in it."""
        self._problems: list[Problem] = []
        self._counts: Counter[tuple[ProblemKind, Weight]] = Counter()

    def add(
        self,
        kind: ProblemKind,
        detail: str,
        *,
        tensor: str | None = None,
        severity: Weight = "error",
        role: Role | None = None,
    ) -> None:
        """Add a problem; its texts come from a file and are cleaned."""
        self._counts[kind, severity] += 1
        if self._counts[kind, severity] > MOST_PER_KIND:
            return
        problem = Problem(
            file=str(self.path),
            kind=kind,
            tensor=None if tensor is None else clean(tensor, 200),
            detail=clean(detail, 600),
            severity=severity,
            role=role,
        )
        self._problems.append(problem)

    def problems(self) -> list[Problem]:
        """Return the first problems of each kind, and one line for each kind that has more."""
        listed = list(self._problems)
        for (kind, severity), count in self._counts.items():
            if count > MOST_PER_KIND:
                detail = f"and {count - MOST_PER_KIND} more of this kind in this file"
                more = Problem(file=str(self.path), kind=kind, severity=severity, detail=detail)
                listed.append(more)
        return listed

    def add_tensor(
        self,
        name: str,
        role: Role,
        dtype: str,
        shape: tuple[int, ...],
        start: int,
        size: int,
        base: int | None = None,
    ) -> None:
        """Add a tensor whose `size` bytes begin at `start` of the file, its storage at `base`."""
        tensor = StoredTensor(name, role, dtype, shape, start, size)
        if size and is_real(dtype):
            tensor.values = Values(start, size, dtype, start if base is None else base)
        self.tensors.append(tensor)


def scan(source: FileSlice, layout: FileLayout, progress: Progress) -> int:
    """Measure every tensor, report every checksum that does not match; returns bytes read."""
    spans: list[Values | Checksum] = [each for each in layout.checksums if each.size]
    spans += _shared(layout.tensors)
    # runs of spans that share no bytes are read by several threads
    runs: list[deque[Values | Checksum]] = []
    end = 0
    for span in sorted(spans, key=lambda span: span.start):
        if not runs or (span.start >= end and end - runs[-1][0].start >= RUN):
            runs.append(deque())
        runs[-1].append(span)
        end = max(end, span.start + span.size)
    done = 0
    before = torch.get_num_threads()
    try:
        # torch's threads in each of them would compete for the same cores
        with ThreadPoolExecutor(WORKERS, "stepguard-verify", torch.set_num_threads, (1,)) as pool:
            for count in pool.map(lambda run: _read(source, run), runs):
                done += count
                progress(count)
    finally:
        # a part of what the workers set (MKL) counts for the whole process
        torch.set_num_threads(before)
    for checksum in layout.checksums:
        checksum.compare(layout)
    return done


def _shared(tensors: list[StoredTensor]) -> list[Values]:
    """Let tensors over the same bytes share their values; where views overlap too often, all do."""
    storages: dict[int, list[StoredTensor]] = {}
    same: dict[tuple[int, int, str], Values] = {}
    for tensor in tensors:
        if tensor.values is not None:
            key = (tensor.start, tensor.size, tensor.dtype)
            tensor.values = same.setdefault(key, tensor.values)
            storages.setdefault(tensor.values.base, []).append(tensor)
    found: list[Values] = []
    for base, views in storages.items():
        distinct = {id(view.values): view.values for view in views if view.values}
        start = min(values.start for values in distinct.values())
        stop = max(values.start + values.size for values in distinct.values())
        # a hostile file can declare a million views of one storage: reading must stay linear
        if sum(values.size for values in distinct.values()) > OVERLAP * (stop - start):
            whole = Values(start, stop - start, views[0].dtype, base)
            distinct = {0: whole}
            for tensor in views:
                tensor.values = whole
        found.extend(distinct.values())
    return found


def _read(source: FileSlice, waiting: deque[Values | Checksum]) -> int:
    """Read from front to back, and update every span with its bytes in their order."""
    # torch.frombuffer needs memory that can be written to, so bytes would not do
    memory = bytearray(PIECE)
    active: list[Values | Checksum] = []
    position = 0
    done = 0
    while active or waiting:
        if not active:
            position = max(position, waiting[0].start)
        stop = position + PIECE
        while waiting and waiting[0].start < stop:
            active.append(waiting.popleft())
        stop = min(stop, max(span.start + span.size for span in active))
        for span in active:
            # no cut may split an element
            if isinstance(span, Values) and span.start < stop < span.start + span.size:
                stop -= (stop - span.base) % 16
                break
        source.fill(memoryview(memory)[: stop - position], position)
        for span in active:
            first = max(span.start, position)
            last = min(span.start + span.size, stop)
            if first < last:
                span.update(memory, first - position, last - first)
        active = [span for span in active if span.start + span.size > stop]
        done += stop - position
        position = stop
    return done


# --- Judge the values of every tensor: what trained checkpoints hold is not a problem.

LARGEST = {"float64": 1.797e308, "float32": 3.402e38, "bfloat16": 3.389e38, "float16": 65504.0}
"""Types whose values are judged by magnitude; 8-bit floats have a scale stored beside them."""


ABSURD = 1e18
"""A weight whose square overflows float32 a few layers later."""
LEARNED: frozenset[Role] = frozenset({"parameter", "ema"})
STRICT: frozenset[Role] = frozenset({"parameter", "ema", "optimizer", "scaler", "scheduler"})
FINITE_SETTINGS = frozenset(
    [
        "lr",
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_lrs",
        "_last_lr",
        "eps",
        "weight_decay",
        "momentum",
        "betas",
        "scale",
        "_scale",
        "dampening",
        "alpha",
    ]
)
"""Settings that must be finite. Others may be infinite, such as `best` of ReduceLROnPlateau."""


def judge(layout: FileLayout, allowed: frozenset[str] = frozenset()) -> None:
    """Report everything that is wrong with the values; tensors in `allowed` may be non-finite."""
    for tensor in layout.tensors:
        values = tensor.values
        if values is None or not values.count:
            continue
        if values.bad and tensor.name not in allowed:
            _judge_nonfinite(layout, tensor, values)
        if tensor.dtype not in LARGEST or values.low > values.high:
            continue
        if values.low < 0 and SQUARES.search(tensor.name):
            detail = f"holds {values.low:.4g} where only squares belong, so its root is NaN"
            layout.add("negative", detail, tensor=tensor.name, role=tensor.role)
        if tensor.role not in LEARNED:
            continue
        for kind, detail, severity in _oddities(tensor, values):
            layout.add(kind, detail, tensor=tensor.name, severity=severity, role=tensor.role)
    _judge_numbers(layout)


def _judge_numbers(layout: FileLayout) -> None:
    for name, role, value in layout.numbers:
        # the last part of a name that is not an index: `betas` of `param_groups/0/betas/1`
        key = re.sub(r"(/\d+)+$", "", name).rpartition("/")[2]
        if role in STRICT and (math.isnan(value) or key in FINITE_SETTINGS):
            layout.add("nan" if math.isnan(value) else "inf", f"is {value}", tensor=name, role=role)


def _judge_nonfinite(layout: FileLayout, tensor: StoredTensor, values: Values) -> None:
    """Report `2 NaN, 1 -Inf of 64, first at [3, 1]; finite from -1 to 2`."""
    role = tensor.role
    # an attention mask holds 0 and -Inf only
    if not values.nan and not values.positive and values.low == values.high == 0:
        if BUFFERS.search(tensor.name):
            return
        if role == "parameter":
            role = "buffer"
    # the best score of a callback that has not seen one yet is infinite
    if role == "other" and not values.nan:
        return
    detail = values.counted
    # of a view with strides, the element number in the bytes is not an index
    if values.first is not None and tensor.shape and math.prod(tensor.shape) == values.count:
        place = np.array(np.unravel_index(values.first, tensor.shape))
        detail += f", first at {place.tolist()}"
    detail += values.finite
    severity: Weight = "warning"
    if role in STRICT or NORM_STATISTICS.search(tensor.name):
        severity = "error"
    kind: ProblemKind = "inf"
    if values.nan:
        kind = "nan"
    layout.add(kind, detail, tensor=tensor.name, severity=severity, role=role)


def _oddities(tensor: StoredTensor, values: Values) -> Iterator[tuple[ProblemKind, str, Weight]]:
    """What finite values no trained tensor of this name and type has."""
    low, high = values.low, values.high
    largest = max(abs(low), abs(high))
    limit = LARGEST[tensor.dtype]
    reach = f"(range {low:.3g} to {high:.3g})"
    # a mask is filled with the lowest number of its type
    is_mask = largest >= 0.99 * limit and high <= 0
    if not is_mask and limit > ABSURD and largest > ABSURD and low != high:
        yield "magnitude", f"reaches {largest:.3g}; no trained weight does {reach}", "error"
    elif not is_mask and largest > min(1e8, limit / 2):
        yield "magnitude", f"reaches {largest:.3g} in {tensor.dtype} {reach}", "warning"
    # vectors often have one value: biases, norm weights, gates; few elements say nothing
    is_matrix = len(tensor.shape) >= 2 and values.count >= 64
    if is_matrix and low == high and not values.bad and not USUALLY_ZERO.search(tensor.name):
        shape = "x".join(map(str, tensor.shape))
        detail = f"is {low:.4g} everywhere ({shape}); a trained matrix is not constant"
        yield "constant" if low else "zero", detail, "warning"

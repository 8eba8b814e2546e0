"""Bounded reads of untrusted files, problems found in them, and what names in a checkpoint mean."""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepguard.records.checks import Problem, ProblemKind, Role, Weight

# --- What names in a checkpoint mean: element types of all formats, and the role of a value.


# --- Element types by their torch names.

SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
}  # fmt: skip


def _table(text: str) -> dict[str, str]:
    """Parse words of `name=torch_name`."""
    return dict(word.split("=") for word in text.split())


ALIASES = _table(
    "float=float32 double=float64 half=float16 long=int64 int=int32 short=int16 "
    "cfloat=complex64 cdouble=complex128 chalf=complex32"
)
STORAGES = _table(
    """
    FloatStorage=float32 DoubleStorage=float64 HalfStorage=float16 BFloat16Storage=bfloat16
    LongStorage=int64 IntStorage=int32 ShortStorage=int16 CharStorage=int8 ByteStorage=uint8
    BoolStorage=bool UntypedStorage=uint8 ComplexFloatStorage=complex64
    ComplexDoubleStorage=complex128 QInt8Storage=qint8 QUInt8Storage=quint8 QInt32Storage=qint32
    QUInt4x2Storage=quint4x2 QUInt2x4Storage=quint2x4
    """
)
SAFETENSORS = _table(
    """
    F64=float64 F32=float32 F16=float16 BF16=bfloat16 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2
    F8_E8M0=float8_e8m0fnu F8_E4M3FNUZ=float8_e4m3fnuz F8_E5M2FNUZ=float8_e5m2fnuz C64=complex64
    I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 U16=uint16 U8=uint8 BOOL=bool
    """
)
SAFETENSORS_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of types that are packed below a byte: their size is checked, their values are not."""
NUMPY = _table(
    """
    f8=float64 f4=float32 f2=float16 c16=complex128 c8=complex64 i8=int64 i4=int32 i2=int16 i1=int8
    u8=uint64 u4=uint32 u2=uint16 u1=uint8 b1=bool
    """
)
LARGEST = {"float64": 1.797e308, "float32": 3.402e38, "bfloat16": 3.389e38, "float16": 65504.0}
"""Types whose values are judged by magnitude; 8-bit floats have a scale stored beside them."""


def is_real(dtype: str) -> bool:
    """Can an element be NaN or infinite?"""
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float4_e2m1fn_x2"


def is_shape(value: object) -> bool:
    """Could these be the sizes or strides of a tensor? Only then may they be multiplied."""
    if not isinstance(value, tuple | list) or len(value) > 64:
        return False
    # Python integers have no end, and one of more than 4300 digits cannot even be printed
    return all(type(n) is int and abs(n) <= 1 << 63 for n in value)


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


def structural(value: dict[Any, Any]) -> Role | None:
    """Recognise the state of an optimizer, scheduler or scaler by its keys."""
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


LARGEST_INDEX = 32 << 20
"""Bytes of a zip directory, a safetensors header or a JSON file: about 300 000 tensors."""
MOST_PER_KIND = 20
"""Problems of one kind that are listed for one file; the others are counted in one line."""
LONGEST_NAME = 200
LONGEST_DETAIL = 600
BUFFER = 1 << 18
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


class ProblemList:
    """The problems of one file. Only the first of each kind are kept, the others are counted."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self._kept: list[Problem] = []
        self._seen: Counter[tuple[ProblemKind, Weight]] = Counter()

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
        self._seen[kind, severity] += 1
        if self._seen[kind, severity] > MOST_PER_KIND:
            return
        if tensor is not None:
            tensor = clean(tensor, LONGEST_NAME)
        detail = clean(detail, LONGEST_DETAIL)
        problem = Problem(
            file=self.file, kind=kind, tensor=tensor, detail=detail, severity=severity, role=role
        )
        self._kept.append(problem)

    def all(self) -> list[Problem]:
        """Return the kept problems, and one line for each kind that has more."""
        listed = list(self._kept)
        for (kind, severity), seen in self._seen.items():
            more = seen - MOST_PER_KIND
            if more > 0:
                detail = f"and {more} more of this kind in this file"
                listed.append(Problem(file=self.file, kind=kind, severity=severity, detail=detail))
        return listed


def clean(text: str, longest: int) -> str:
    """Replace unprintable characters and shorten: text from a file must not control a terminal."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    if len(shown) > longest:
        return shown[: longest - 3] + "..."
    return shown


def first_few(items: Iterable[object]) -> str:
    """List the first five items, and how many more there are."""
    listed = list(map(str, items))
    more = len(listed) - 5
    return ", ".join(listed[:5]) + (f" and {more} more" if more > 0 else "")


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
            detail = f"{size:,} bytes are declared at {start:,}, but there are only {self.size:,}"
            raise Damaged("torn", detail)
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
            detail = f"ends at byte {self.size:,} where {size:,} more are declared at {position:,}"
            raise Damaged("torn", detail)

    def fill(self, view: memoryview, position: int) -> None:
        """Read as much as the view holds; Damaged if the file became shorter in the meantime."""
        filled = 0
        # one call returns at most 2 GB on Linux, and less after a signal
        while filled < len(view):
            at = self.start + position + filled
            try:
                count = os.preadv(self.descriptor, [view[filled:]], at)
            except OSError as error:
                detail = f"cannot be read at byte {at:,}: {error.strerror}"
                raise Damaged("unreadable", detail) from error
            if not count:
                detail = f"ends at byte {at:,}: it became shorter while it was read"
                raise Damaged("torn", detail)
            filled += count

    def reader(self) -> io.BufferedReader:
        """Return a buffered file object of the slice."""
        return io.BufferedReader(self.part(0, self.size), BUFFER)

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
    try:
        _refuse_special(path.stat().st_mode)
        # without O_NONBLOCK, opening a FIFO that has no writer would wait forever
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged("unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        # the path may have been replaced between stat and open
        _refuse_special(facts.st_mode)
        yield FileSlice(descriptor, 0, facts.st_size)
    finally:
        os.close(descriptor)


def _refuse_special(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise Damaged("unreadable", f"is {special_name(mode)}, not a file")


def special_name(mode: int) -> str:
    """Name the kind of a special file for a message: `a device`."""
    return FILE_KINDS.get(stat.S_IFMT(mode), "something else")


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

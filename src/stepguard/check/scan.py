"""Read a file once: every checksum, and the values of every tensor, which are then judged."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from stepguard.check.bounded_file import (
    BUFFERS,
    LARGEST,
    NORM_STATISTICS,
    SQUARES,
    USUALLY_ZERO,
    FileSlice,
    ProblemList,
    is_real,
)
from stepguard.records.checks import ProblemKind, Rate, Role

try:
    # the same function as zlib's, three times as fast
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

Progress = Callable[[int], None]
"""Takes the number of bytes that were read since the last call."""
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
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
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
    squares: float = 0.0
    """Sum of the squares of the finite values; 0 where it was not needed."""

    @property
    def bad(self) -> int:
        return self.nan + self.positive + self.negative

    @property
    def largest(self) -> float:
        """Return the largest magnitude of the finite values."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    def update(self, memory: bytearray, offset: int, size: int) -> None:
        """Measure the next part of the bytes."""
        values = self._view(memory, offset, size)
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

    def _view(self, memory: bytearray, offset: int, size: int) -> torch.Tensor:
        real = PARTS.get(self.dtype) or getattr(torch, self.dtype)
        return torch.frombuffer(memory, dtype=real, count=size // real.itemsize, offset=offset)


class Squares(Values):
    """Values that are read a second time, for the sum of their squares."""

    def update(self, memory: bytearray, offset: int, size: int) -> None:
        values = self._view(memory, offset, size).double()
        finite = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        self.squares += float(torch.dot(finite, finite))


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

    def compare(self, problems: ProblemList) -> None:
        """Report bytes that have changed."""
        name = "digest"
        seen = self._hash.hexdigest()
        wanted = self.expected
        if isinstance(wanted, int):
            name = "CRC"
            seen = f"{self._crc:08x}"
            wanted = f"{wanted:08x}"
        if seen != wanted:
            detail = f"its {name} is {seen}, it was written with {wanted}: bytes have changed"
            problems.add("checksum", f"{self.label}: {detail}", tensor=self.tensor)


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


@dataclass(slots=True)
class FileLayout:
    """One file: parsed by its format reader, then measured by the scan."""

    path: Path
    problems: ProblemList
    format: str = "unknown"
    size: int = 0
    tensors: list[StoredTensor] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    step: int | None = None
    numbers: list[tuple[str, Role, float]] = field(default_factory=list)
    """Python floats that are NaN or infinite."""
    complete: bool = False
    """The reader reached the end of the file, so a tensor that is not listed is not in it."""

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


def scan(source: FileSlice, layout: FileLayout, progress: Progress) -> None:
    """Measure the values of every tensor, and report every checksum that does not match."""
    _read_all(source, [*_shared(layout.tensors), *layout.checksums], progress)
    for checksum in layout.checksums:
        checksum.compare(layout.problems)
    for tensor in layout.tensors:
        values = tensor.values
        if values is not None and not values.squares and _wants_squares(tensor, values):
            # rare: only now it is known that one value may outweigh all others
            again = Squares(values.start, values.size, values.dtype, values.base)
            _read_all(source, [again], lambda count: None)
            values.squares = again.squares


def _shared(tensors: list[StoredTensor]) -> list[Values]:
    """Let tensors over the same bytes share their values; where views overlap too often, all do."""
    storages: dict[int, dict[tuple[int, int, str], Values]] = {}
    for tensor in tensors:
        if tensor.values is not None:
            values = tensor.values
            same = storages.setdefault(values.base, {})
            key = (values.start, values.size, values.dtype)
            tensor.values = same.setdefault(key, values)
    joined: dict[int, Values] = {}
    for base, same in storages.items():
        start = min(values.start for values in same.values())
        stop = max(values.start + values.size for values in same.values())
        # a hostile file can declare a million views of one storage: reading must stay linear
        if sum(values.size for values in same.values()) > OVERLAP * (stop - start):
            dtype = next(iter(same.values())).dtype
            joined[base] = Values(start, stop - start, dtype, base)
    found: dict[int, Values] = {}
    for tensor in tensors:
        if tensor.values is not None:
            tensor.values = joined.get(tensor.values.base, tensor.values)
            found[id(tensor.values)] = tensor.values
    return list(found.values())


def _read_all(source: FileSlice, spans: Sequence[Values | Checksum], progress: Progress) -> None:
    """Read every span once; runs of spans that share no bytes are read by several threads."""
    runs: list[deque[Values | Checksum]] = []
    end = 0
    for span in sorted((span for span in spans if span.size), key=lambda span: span.start):
        if not runs or (span.start >= end and end - runs[-1][0].start >= RUN):
            runs.append(deque())
        runs[-1].append(span)
        end = max(end, span.start + span.size)
    before = torch.get_num_threads()
    try:
        # torch's threads in each of them would compete for the same cores
        with ThreadPoolExecutor(WORKERS, "stepguard-verify", torch.set_num_threads, (1,)) as pool:
            for _ in pool.map(lambda run: _read(source, run, progress), runs):
                pass
    finally:
        # a part of what the workers set (MKL) counts for the whole process
        torch.set_num_threads(before)


def _read(source: FileSlice, waiting: deque[Values | Checksum], progress: Progress) -> None:
    """Read from front to back, and update every span with its bytes in their order."""
    # torch.frombuffer needs memory that can be written to, so bytes would not do
    memory = bytearray(PIECE)
    active: list[Values | Checksum] = []
    position = 0
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
        progress(stop - position)
        position = stop


# --- Judge the values of every tensor: what trained checkpoints hold is not a problem.

ABSURD = 1e18
"""A weight whose square overflows float32 a few layers later."""
SUSPICIOUS = 1e8
LEARNED: frozenset[Role] = frozenset({"parameter", "ema"})
STRICT: frozenset[Role] = frozenset({"parameter", "ema", "optimizer", "scaler", "scheduler"})
FEWEST = 64
"""Elements below which being constant or having an outlier says nothing."""
DOMINANT = 0.9
"""Share of the sum of squares that makes one element an outlier."""
DOMINANT_SIZE = 100.0
"""Magnitude below which no element is an outlier."""
FINITE_SETTINGS = frozenset({
    "lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "_last_lr", "eps", "weight_decay",
    "momentum", "betas", "scale", "_scale", "dampening", "alpha",
})  # fmt: skip
"""Settings that must be finite. Others may be infinite, such as `best` of ReduceLROnPlateau."""


def _wants_squares(tensor: StoredTensor, values: Values) -> bool:
    """Is the largest value so large that it should be compared with the others?"""
    if tensor.role not in LEARNED or tensor.dtype not in LARGEST or values.count < FEWEST:
        return False
    # above that the magnitude is reported anyway
    return DOMINANT_SIZE <= values.largest <= min(SUSPICIOUS, LARGEST[tensor.dtype] / 2)


def judge(layout: FileLayout, allowed: frozenset[str] = frozenset()) -> None:
    """Report everything that is wrong with the values; tensors in `allowed` may be non-finite."""
    for tensor in layout.tensors:
        values = tensor.values
        if values is None or not values.count:
            continue
        if values.bad and tensor.name not in allowed:
            _judge_nonfinite(layout.problems, tensor, values)
        if tensor.dtype in LARGEST and values.low <= values.high:
            _judge_finite(layout.problems, tensor, values)
    for name, role, value in layout.numbers:
        # the last part of a name that is not an index: `betas` of `param_groups/0/betas/1`
        key = re.sub(r"(/\d+)+$", "", name).rpartition("/")[2]
        if role in STRICT and math.isnan(value):
            layout.problems.add("nan", f"is {value}", tensor=name, role=role)
        elif role in STRICT and key in FINITE_SETTINGS:
            layout.problems.add("inf", f"is {value}", tensor=name, role=role)


def _judge_nonfinite(problems: ProblemList, tensor: StoredTensor, values: Values) -> None:
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
    must_be_finite = role in STRICT or NORM_STATISTICS.search(tensor.name)
    problems.add(
        "nan" if values.nan else "inf",
        _described(tensor, values),
        tensor=tensor.name,
        severity="error" if must_be_finite else "warning",
        role=role,
    )


def _described(tensor: StoredTensor, values: Values) -> str:
    """Describe non-finite values: `2 NaN, 1 -Inf of 64, first at [3, 1]; finite from -1 to 2`."""
    counts = []
    for count, word in ((values.nan, "NaN"), (values.positive, "+Inf"), (values.negative, "-Inf")):
        if count:
            counts.append(f"{count:,} {word}")
    detail = f"{', '.join(counts)} of {values.count:,}"
    # of a view with strides, the element number in the bytes is not an index
    if values.first is not None and tensor.shape and math.prod(tensor.shape) == values.count:
        index = []
        position = values.first
        for size in reversed(tensor.shape):
            position, inside = divmod(position, size)
            index.append(inside)
        detail += f", first at {index[::-1]}"
    if values.low <= values.high:
        detail += f"; finite from {values.low:.4g} to {values.high:.4g}"
    return detail


def _judge_finite(problems: ProblemList, tensor: StoredTensor, values: Values) -> None:
    name = tensor.name
    role = tensor.role
    low = values.low
    if low < 0 and SQUARES.search(name):
        detail = f"holds {low:.4g} where only squares belong, so its root is NaN"
        problems.add("negative", detail, tensor=name, role=role)
    if role in LEARNED:
        _judge_magnitude(problems, tensor, values)
    # vectors often have one value: biases, norm weights, gates
    is_matrix = len(tensor.shape) >= 2 and values.count >= FEWEST and role in LEARNED
    is_constant = low == values.high and not values.bad
    if is_matrix and is_constant and not USUALLY_ZERO.search(name):
        shape = "x".join(map(str, tensor.shape))
        detail = f"is all zero ({shape}); a trained matrix is not"
        kind: ProblemKind = "zero"
        if low:
            detail = f"is {low:.4g} everywhere ({shape}); a trained matrix is not"
            kind = "constant"
        problems.add(kind, detail, tensor=name, severity="warning", role=role)


def _judge_magnitude(problems: ProblemList, tensor: StoredTensor, values: Values) -> None:
    name = tensor.name
    role = tensor.role
    low = values.low
    largest = values.largest
    limit = LARGEST[tensor.dtype]
    reach = f"range {low:.3g} to {values.high:.3g}"
    # a mask is filled with the lowest number of its type
    if largest >= 0.99 * limit and values.high <= 0:
        return
    if limit > ABSURD and largest > ABSURD and low != values.high:
        detail = f"reaches {largest:.3g}; no trained weight does ({reach})"
        problems.add("magnitude", detail, tensor=name, role=role)
    elif largest > min(SUSPICIOUS, limit / 2):
        detail = f"reaches {largest:.3g} in {tensor.dtype} ({reach})"
        problems.add("magnitude", detail, tensor=name, severity="warning", role=role)
    elif values.squares and largest * largest >= DOMINANT * values.squares:
        share = largest * largest / values.squares
        detail = f"{largest:.4g}, carries {share:.1%} of the sum of squares"
        detail = f"one element of {values.count:,}, {detail}"
        problems.add("outlier", detail, tensor=name, severity="warning", role=role)

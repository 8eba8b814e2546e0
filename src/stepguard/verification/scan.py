"""Read a file once with a few threads: the values of every tensor, and every checksum."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from stepguard.records.checks import Role
from stepguard.verification import bounded_file, pickle_machine
from stepguard.verification.bounded_file import SIZES, FileSlice, PieceStatistics, ProblemList
from stepguard.verification.reading import (
    CHUNK,
    PIECE,
    ChecksumRange,
    Chunk,
    ChunkResult,
    FileLayout,
    Segment,
    Statistics,
    StoredTensor,
    cut,
    fill,
    merge,
    pieces,
    read_chunks,
)

# --- Entries of the format tables `file_formats.FORMATS` and `checkpoint_search.FOLDER_FORMATS`.


TORCH_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".th", ".pyth"})
TORCH_SHARED_SUFFIXES = frozenset({".bin"})
"""Suffixes of torch.save; other programs write `.bin` files too."""
Progress = Callable[[int], None]
"""Takes the number of bytes that were read since the last call."""
Read = Callable[[FileSlice, FileLayout, Role | None], object]
"""Fills the layout of a file, or raises Damaged; the role is what the name of the file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One format of checkpoint files."""

    name: str
    """As `Verification.format` says it."""
    matches: Callable[[FileSlice, str], bool]
    """Takes the file and its suffix in lower case: is it one of this format?"""
    read: Read
    read_content: Callable[[FileSlice], Any]
    """Returns what the file holds, with records in the place of tensors. Runs nothing."""
    suffixes: frozenset[str] = frozenset()
    """Suffixes that promise a checkpoint."""
    shared_suffixes: frozenset[str] = frozenset()
    """Suffixes of many kinds of files; one that is not a checkpoint is passed over."""
    starts: tuple[bytes, ...] = ()
    """First bytes that make a file with a shared suffix worth reading."""


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """The files of a checkpoint folder after reading, and what the folder says about itself."""

    layouts: list[FileLayout]
    step: int | None = None
    format: str = ""
    """A more exact name than that of the table entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat:
    """One kind of folder that is a single checkpoint."""

    name: str
    matches: Callable[[list[Path]], bool]
    """Takes the files of a folder, without those below it: are they one checkpoint of this kind?"""
    check: Callable[[CheckpointFiles, ProblemList, Progress], CheckedFolder]
    all_files: bool = False
    """Every file belongs to it; otherwise only those with the suffix of a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """One checkpoint that was found: a file, or a folder with the files that make it up."""

    path: Path
    files: tuple[Path, ...]
    size: int
    folder_format: FolderFormat | None = None
    """None for a single file."""


# --- Judge the statistics of every tensor: what trained checkpoints hold is not a problem.


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
RATE_KEYS = frozenset({
    "lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "_last_lr", "eps", "weight_decay",
    "momentum", "betas", "scale", "_scale", "dampening", "alpha",
})  # fmt: skip
"""Settings that must be finite. Others may be infinite, such as `best` of ReduceLROnPlateau."""


def judge(layout: FileLayout, allowed: frozenset[str] = frozenset()) -> None:
    """Report everything that is wrong with the values; tensors in `allowed` may be non-finite."""
    for tensor in layout.tensors:
        seen = tensor.seen
        if seen is None:
            continue
        if seen.bad and tensor.name not in allowed:
            _judge_nonfinite(layout.problems, tensor, seen)
        _judge_finite(layout.problems, tensor, seen)
    _judge_numbers(layout.problems, layout.numbers)


def wants_squares(tensor: StoredTensor) -> bool:
    """Is the largest value so large that it should be compared with the others?"""
    seen = tensor.seen
    if seen is None or tensor.role not in LEARNED or tensor.dtype not in bounded_file.LARGEST:
        return False
    # above that the magnitude is reported anyway
    most = min(SUSPICIOUS, bounded_file.LARGEST[tensor.dtype] / 2)
    return seen.count >= FEWEST and DOMINANT_SIZE <= seen.largest <= most


def _judge_numbers(problems: ProblemList, numbers: list[tuple[str, Role, float]]) -> None:
    """Judge Python floats in the state of an optimizer, scheduler or scaler."""
    for name, role, value in numbers:
        if role not in STRICT:
            continue
        if math.isnan(value):
            problems.add("nan", f"is {value}", tensor=name, role=role)
        elif _key(name) in RATE_KEYS:
            problems.add("inf", f"is {value}", tensor=name, role=role)


def _key(name: str) -> str:
    """Return the last part of a name that is not an index: `betas` of `param_groups/0/betas/1`."""
    for part in reversed(name.split("/")):
        if not part.isdigit():
            return part
    return ""


def _judge_nonfinite(problems: ProblemList, tensor: StoredTensor, seen: Statistics) -> None:
    role = tensor.role
    if _is_mask(seen):
        if pickle_machine.BUFFERS.search(tensor.name):
            return
        if role == "parameter":
            role = "buffer"
    # the best score of a callback that has not seen one yet is infinite
    if role == "other" and not seen.nan:
        return
    must_be_finite = role in STRICT or pickle_machine.NORM_STATISTICS.search(tensor.name)
    problems.add(
        "nan" if seen.nan else "inf",
        _count(tensor, seen),
        tensor=tensor.name,
        severity="error" if must_be_finite else "warning",
        role=role,
    )


def _is_mask(seen: Statistics) -> bool:
    """An attention mask holds 0 and -Inf only."""
    return not seen.nan and not seen.positive and seen.low == seen.high == 0


def _count(tensor: StoredTensor, seen: Statistics) -> str:
    """Describe non-finite values: `2 NaN, 1 -Inf of 64, first at [3, 1]; finite from -1 to 2`."""
    counts = []
    for count, word in ((seen.nan, "NaN"), (seen.positive, "+Inf"), (seen.negative, "-Inf")):
        if count:
            counts.append(f"{count:,} {word}")
    text = f"{', '.join(counts)} of {seen.count:,}"
    # of a view with strides, the element number in the segment is not an index
    if seen.first is not None and tensor.shape and math.prod(tensor.shape) == seen.count:
        text += f", first at {_index(seen.first, tensor.shape)}"
    if seen.any_finite:
        text += f"; finite from {seen.low:.4g} to {seen.high:.4g}"
    return text


def _index(position: int, shape: tuple[int, ...]) -> list[int]:
    found = []
    for size in reversed(shape):
        position, inside = divmod(position, size)
        found.append(inside)
    return found[::-1]


def _judge_finite(problems: ProblemList, tensor: StoredTensor, seen: Statistics) -> None:
    if tensor.dtype not in bounded_file.LARGEST or not seen.any_finite:
        return
    if seen.low < 0 and pickle_machine.SQUARES.search(pickle_machine.slot(tensor.name)):
        detail = f"holds {seen.low:.4g} where only squares belong, so its root is NaN"
        problems.add("negative", detail, tensor=tensor.name, role=tensor.role)
    if tensor.role in LEARNED:
        _judge_magnitude(problems, tensor, seen)
        _judge_sameness(problems, tensor, seen)


def _judge_magnitude(problems: ProblemList, tensor: StoredTensor, seen: Statistics) -> None:
    largest = seen.largest
    limit = bounded_file.LARGEST[tensor.dtype]
    # a mask is filled with the lowest number of its type
    if largest >= 0.99 * limit and seen.high <= 0:
        return
    reach = f"range {seen.low:.3g} to {seen.high:.3g}"
    is_constant = seen.low == seen.high
    if limit > ABSURD and largest > ABSURD and not is_constant:
        detail = f"reaches {largest:.3g}; no trained weight does ({reach})"
        problems.add("magnitude", detail, tensor=tensor.name, role=tensor.role)
    elif largest > min(SUSPICIOUS, limit / 2):
        detail = f"reaches {largest:.3g} in {tensor.dtype} ({reach})"
        problems.add("magnitude", detail, tensor=tensor.name, severity="warning", role=tensor.role)
    elif _has_outlier(seen):
        share = largest * largest / seen.squares
        detail = (
            f"one element of {seen.count:,}, {largest:.4g}, carries {share:.1%} of the sum of "
            f"squares"
        )
        problems.add("outlier", detail, tensor=tensor.name, severity="warning", role=tensor.role)


def _has_outlier(seen: Statistics) -> bool:
    if seen.count < FEWEST or seen.largest < DOMINANT_SIZE or not seen.squares:
        return False
    return seen.largest * seen.largest >= DOMINANT * seen.squares


def _judge_sameness(problems: ProblemList, tensor: StoredTensor, seen: Statistics) -> None:
    """Report matrices of one value. Vectors often are: biases, norm weights, gates."""
    if seen.low != seen.high or seen.bad or len(tensor.shape) < 2 or seen.count < FEWEST:
        return
    if pickle_machine.USUALLY_ZERO.search(tensor.name):
        return
    shape = "x".join(map(str, tensor.shape))
    if seen.low == 0:
        detail = f"is all zero ({shape}); a trained matrix is not"
        problems.add("zero", detail, tensor=tensor.name, severity="warning", role=tensor.role)
    else:
        detail = f"is {seen.low:.4g} everywhere ({shape}); a trained matrix is not"
        problems.add("constant", detail, tensor=tensor.name, severity="warning", role=tensor.role)


# --- Read a file once with a few threads: the values of every tensor, and every checksum.


WORKERS = min(4, os.cpu_count() or 1)
SMALL = 4 << 20
"""Files up to this size are not worth a thread."""
Advance = Callable[[int], None]
Sums = dict[ChecksumRange, str]


def scan(source: FileSlice, layout: FileLayout, advance: Advance) -> None:
    """Fill the statistics of every tensor, and report every checksum that does not match."""
    segments = merge(layout.tensors)
    summed = [each for each in layout.checksums if each.algorithm == "crc32"]
    hashed = [each for each in layout.checksums if each.algorithm != "crc32"]
    chunks = cut(segments, summed, PIECE, CHUNK)
    if source.size <= SMALL or WORKERS == 1:
        sums = _hashes(source, hashed)
        sums |= _collect((read_chunks(source, [chunk]) for chunk in chunks), advance)
    else:
        with _thread_pool() as pool:
            hashing = pool.submit(_hashes, source, hashed)
            sums = _collect(_read_in_order(pool, source, chunks), advance)
            sums |= hashing.result()
    _compare(layout, sums)
    _measure_outliers(source, layout)


@contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
    # four workers with torch's own threads in each would compete for the same cores
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(WORKERS, "stepguard-verify", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        # a part of what the workers set (MKL) counts for the whole process
        torch.set_num_threads(before)


def _read_in_order(
    pool: ThreadPoolExecutor, source: FileSlice, chunks: Iterator[Chunk]
) -> Iterator[list[ChunkResult]]:
    """Yield results in the order of the file, with a bounded number of chunks being read."""
    # in file order, because CRCs are combined from left to right
    waiting: deque[Future[list[ChunkResult]]] = deque()
    for bundle in _bundles(chunks):
        waiting.append(pool.submit(read_chunks, source, bundle))
        if len(waiting) >= 2 * WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _bundles(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Bundle small chunks, so that handing them to a thread costs little beside the work."""
    bundle: list[Chunk] = []
    size = 0
    for chunk in chunks:
        bundle.append(chunk)
        size += chunk.size
        if size >= CHUNK // 2:
            yield bundle
            bundle = []
            size = 0
    if bundle:
        yield bundle


def _collect(results: Iterable[list[ChunkResult]], advance: Advance) -> Sums:
    """Add statistics to the segments, and combine the CRCs of parts in the order of the file."""
    crcs: dict[ChecksumRange, int] = {}
    for bundle in results:
        for result in bundle:
            for segment, offset, values in result.values:
                _add(segment, values, offset)
            for part, value in result.crcs:
                assert isinstance(part.owner, ChecksumRange)
                crcs[part.owner] = bounded_file.combine(crcs.get(part.owner, 0), value, part.size)
            advance(result.chunk.size)
    return {owner: f"{value:08x}" for owner, value in crcs.items()}


def _add(segment: Segment, values: PieceStatistics, offset: int) -> None:
    seen = segment.seen
    if values.first is not None and seen.first is None:
        seen.first = offset // SIZES[segment.dtype] + values.first
    seen.count += values.count
    seen.nan += values.nan
    seen.positive += values.positive
    seen.negative += values.negative
    seen.low = min(seen.low, values.low)
    seen.high = max(seen.high, values.high)


def _hashes(source: FileSlice, checksums: Sequence[ChecksumRange]) -> Sums:
    """Compute XXH3 digests, which cannot be combined from parts: one thread, in file order."""
    running = {each: xxhash.xxh3_128() for each in checksums}
    buffer = memoryview(bytearray(PIECE))
    for chunk in cut([], checksums, PIECE, CHUNK):
        for start, size in pieces(chunk):
            fill(source, buffer[:size], chunk.start + start)
            for part in chunk.parts:
                assert isinstance(part.owner, ChecksumRange)
                wanted = buffer[:size]
                # only a chunk of one piece has parts that cover less than all of it
                if chunk.size <= PIECE:
                    wanted = buffer[part.offset : part.offset + part.size]
                running[part.owner].update(wanted)
    return {owner: digest.hexdigest() for owner, digest in running.items()}


def _compare(layout: FileLayout, sums: Sums) -> None:
    for each in layout.checksums:
        name = "digest"
        wanted = str(each.expected)
        if isinstance(each.expected, int):
            name = "CRC"
            wanted = f"{each.expected:08x}"
        # an empty range is in no chunk; the CRC of nothing is 0
        seen = sums.get(each, "00000000")
        if seen != wanted:
            detail = (
                f"{each.label}: its {name} is {seen}, it was written with {wanted}: bytes "
                f"have changed"
            )
            layout.problems.add("checksum", detail, tensor=each.tensor)


def _measure_outliers(source: FileSlice, layout: FileLayout) -> None:
    """Read tensors again whose largest value stands out, for the sum of their squares."""
    for tensor in layout.tensors:
        segment = tensor.segment
        if segment is not None and not segment.seen.squares and wants_squares(tensor):
            segment.seen.squares = _squares(source, segment)


def _squares(source: FileSlice, segment: Segment) -> float:
    buffer = bytearray(PIECE)
    view = memoryview(buffer)
    total = 0.0
    for chunk in cut([segment], [], PIECE, CHUNK):
        for start, size in pieces(chunk):
            fill(source, view[:size], chunk.start + start)
            values = bounded_file.as_tensor(buffer, 0, size, segment.dtype)
            total += bounded_file.squares(values)
    return total

"""Judge the statistics of every tensor: what trained checkpoints hold is not a problem."""

from __future__ import annotations

import math

from stepguard.records.verification import Role
from stepguard.verification import dtype_names, roles
from stepguard.verification.damage import ProblemList
from stepguard.verification.file_layout import FileLayout, Statistics, StoredTensor

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
    if seen is None or tensor.role not in LEARNED or tensor.dtype not in dtype_names.LARGEST:
        return False
    most = min(SUSPICIOUS, dtype_names.LARGEST[tensor.dtype] / 2)
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
        if roles.BUFFERS.search(tensor.name):
            return
        if role == "parameter":
            role = "buffer"
    # the best score of a callback that has not seen one yet is infinite
    if role == "other" and not seen.nan:
        return
    must_be_finite = role in STRICT or roles.NORM_STATISTICS.search(tensor.name)
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
    if tensor.dtype not in dtype_names.LARGEST or not seen.any_finite:
        return
    if seen.low < 0 and roles.SQUARES.search(roles.slot(tensor.name)):
        detail = f"holds {seen.low:.4g} where only squares belong, so its root is NaN"
        problems.add("negative", detail, tensor=tensor.name, role=tensor.role)
    if tensor.role in LEARNED:
        _judge_magnitude(problems, tensor, seen)
        _judge_sameness(problems, tensor, seen)


def _judge_magnitude(problems: ProblemList, tensor: StoredTensor, seen: Statistics) -> None:
    largest = seen.largest
    limit = dtype_names.LARGEST[tensor.dtype]
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
    if roles.USUALLY_ZERO.search(tensor.name):
        return
    shape = "x".join(map(str, tensor.shape))
    if seen.low == 0:
        detail = f"is all zero ({shape}); a trained matrix is not"
        problems.add("zero", detail, tensor=tensor.name, severity="warning", role=tensor.role)
    else:
        detail = f"is {seen.low:.4g} everywhere ({shape}); a trained matrix is not"
        problems.add("constant", detail, tensor=tensor.name, severity="warning", role=tensor.role)

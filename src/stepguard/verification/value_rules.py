"""From the statistics of a tensor to what is wrong with it. What healthy checkpoints hold is no
problem.
"""

from __future__ import annotations

import math

from stepguard.records.verification import ProblemKind, Role
from stepguard.verification import dtype_names, roles
from stepguard.verification.damage import Notes
from stepguard.verification.file_layout import Layout, Look, Statistics, elements

ABSURD = 1e18
"""A weight whose square overflows in float32 a few layers on."""
SUSPICIOUS = 1e8
LEARNED: frozenset[Role] = frozenset({"parameter", "ema"})
STRICT: frozenset[Role] = frozenset({"parameter", "ema", "optimizer", "scaler", "scheduler"})
FEWEST = 64
"""Elements below which being constant or having an outlier says nothing."""
DOMINANT, DOMINANT_SIZE = 0.9, 100.0
"""One element that carries this share of the sum of squares, and is at least this large."""
RATE_KEYS = frozenset(
    {
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
    }
)
"""Settings that must be finite. Others may be infinite: `best` of ReduceLROnPlateau, Prodigy's
`growth_rate`.
"""


def judge(layout: Layout, allowed: frozenset[str] = frozenset()) -> None:
    """Take a note of everything that is wrong with the scanned tensors. `allowed` may be
    non-finite.
    """
    for look in layout.looks:
        if look.segment is not None and look.segment.seen.count:
            if look.segment.seen.bad and look.name not in allowed:
                _not_finite(layout.notes, look, look.segment.seen)
            _values(layout.notes, look, look.segment.seen)
    _numbers(layout.notes, layout.numbers)


def wants_squares(look: Look) -> bool:
    """Is the largest value so large that it should be compared with the others?"""
    seen = look.segment.seen if look.segment is not None else None
    if seen is None or look.role not in LEARNED or look.dtype not in dtype_names.LARGEST:
        return False
    return seen.count >= FEWEST and DOMINANT_SIZE <= seen.largest <= min(
        SUSPICIOUS, dtype_names.LARGEST[look.dtype] / 2
    )


def _numbers(notes: Notes, numbers: list[tuple[str, Role, float]]) -> None:
    """Python floats in the state of an optimizer, scheduler or scaler."""
    for name, role, value in numbers:
        key = next((part for part in reversed(name.split("/")) if not part.isdigit()), "")
        if role in STRICT and (math.isnan(value) or key in RATE_KEYS):
            notes.add("nan" if math.isnan(value) else "inf", f"is {value}", tensor=name, role=role)


def _not_finite(notes: Notes, look: Look, seen: Statistics) -> None:
    role: Role = look.role
    is_mask = not seen.nan and not seen.positive and seen.low == seen.high == 0
    if (is_mask and roles.BUFFERS.search(look.name)) or (role == "other" and not seen.nan):
        return  # a causal mask of -Inf and 0; the best score of a callback that has seen none
    if is_mask and role == "parameter":
        role = "buffer"
    must = role in STRICT or bool(roles.NORM_STATISTICS.search(look.name))
    kind: ProblemKind = "nan" if seen.nan else "inf"
    notes.add(
        kind,
        _count(look, seen),
        tensor=look.name,
        severity="error" if must else "warning",
        role=role,
    )


def _count(look: Look, seen: Statistics) -> str:
    counts = ((seen.nan, "NaN"), (seen.positive, "+Inf"), (seen.negative, "-Inf"))
    text = ", ".join(f"{count:,} {word}" for count, word in counts if count)
    text += f" of {seen.count:,}"
    if seen.first is not None and elements(look.shape) == seen.count and look.shape:
        text += f", first at {list(_index(seen.first, look.shape))}"
    if seen.low <= seen.high:
        text += f"; finite from {seen.low:.4g} to {seen.high:.4g}"
    return text


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        position, inside = divmod(position, size)
        found.append(inside)
    return tuple(reversed(found))


def _values(notes: Notes, look: Look, seen: Statistics) -> None:
    if look.dtype not in dtype_names.LARGEST or seen.low > seen.high:
        return
    if seen.low < 0 and roles.SQUARES.search(roles.slot(look.name)):
        detail = f"holds {seen.low:.4g} where only squares belong, so its root is NaN"
        notes.add("negative", detail, tensor=look.name, role=look.role)
    if look.role in LEARNED:
        _magnitude(notes, look, seen)
        _sameness(notes, look, seen)


def _magnitude(notes: Notes, look: Look, seen: Statistics) -> None:
    largest, edge = seen.largest, dtype_names.LARGEST[look.dtype]
    constant = seen.low == seen.high
    if largest >= 0.99 * edge and seen.high <= 0:
        return  # a mask that is filled with the lowest number there is
    if edge > ABSURD and largest > ABSURD and not constant:
        detail = (
            f"reaches {largest:.3g}; no trained weight does (range {seen.low:.3g} to "
            f"{seen.high:.3g})"
        )
        notes.add("magnitude", detail, tensor=look.name, role=look.role)
    elif largest > min(SUSPICIOUS, edge / 2):
        detail = f"reaches {largest:.3g} in {look.dtype} (range {seen.low:.3g} to {seen.high:.3g})"
        notes.add("magnitude", detail, tensor=look.name, severity="warning", role=look.role)
    elif _has_outlier(seen):
        share = largest * largest / seen.squares
        detail = (
            f"one element of {seen.count:,}, {largest:.4g}, carries {share:.1%} of the sum of "
            f"squares"
        )
        notes.add("outlier", detail, tensor=look.name, severity="warning", role=look.role)


def _has_outlier(seen: Statistics) -> bool:
    if seen.count < FEWEST or seen.largest < DOMINANT_SIZE or not seen.squares:
        return False
    return seen.largest * seen.largest >= DOMINANT * seen.squares


def _sameness(notes: Notes, look: Look, seen: Statistics) -> None:
    """Matrices that hold one value only. Vectors often do: biases, norm weights, gates."""
    if seen.low != seen.high or seen.bad or len(look.shape) < 2 or seen.count < FEWEST:
        return
    if roles.USUALLY_ZERO.search(look.name):
        return
    kind: ProblemKind = "zero" if seen.low == 0 else "constant"
    what = "is all zero" if seen.low == 0 else f"is {seen.low:.4g} everywhere"
    detail = f"{what} ({'x'.join(map(str, look.shape))}); a trained matrix is not"
    notes.add(kind, detail, tensor=look.name, severity="warning", role=look.role)

"""Everything one pass over the data tells: counts, and the names of the first examples of each
kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepguard.preflight.data.examples import Example, Source
from stepguard.preflight.data.files import as_tensors
from stepguard.preflight.data.labels import LabelFacts

KEPT_NAMES = 50
LEAST_ELEMENTS = 16
"""A tensor with fewer elements may be constant by chance."""

Progress = Callable[[int, int | None], None]


@dataclass(slots=True)
class Named:
    """How many, and the names of the first."""

    number: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.number += 1
        if len(self.names) < KEPT_NAMES:
            self.names.append(name)


@dataclass(slots=True)
class Column:
    """One key over all examples."""

    numbers: int = 0
    missing: Named = field(default_factory=Named)
    low: float = math.inf
    high: float = -math.inf
    scalar: bool = True
    whole: bool = True
    """Integers or booleans only: an id or a class, not a measurement."""
    largest: list[tuple[float, str]] = field(default_factory=list)
    """Largest magnitude of each example, with its name."""


@dataclass(slots=True)
class DataFacts:
    """What the data items look at."""

    what: str
    seen: int = 0
    whole: int | None = None
    nonfinite: Named = field(default_factory=Named)
    constant: Named = field(default_factory=Named)
    unreadable: Named = field(default_factory=Named)
    duplicates: Named = field(default_factory=Named)
    columns: dict[str, Column] = field(default_factory=dict)
    prints: dict[bytes, str] = field(default_factory=dict)
    """Fingerprint of the content -> name of the first example that has it."""
    labels: LabelFacts = field(default_factory=LabelFacts)
    remarks: list[str] = field(default_factory=list)

    @property
    def scope(self) -> str:
        """`all 512 examples of the dataset`."""
        if self.whole is not None and self.seen < self.whole:
            return f"the first {self.seen:,} of {self.whole:,} examples of the {self.what}"
        return f"{self.seen:,} {'example' if self.seen == 1 else 'examples'} of the {self.what}"


def gather(source: Source, labels: LabelFacts, progress: Progress | None = None) -> DataFacts:
    """One pass; nothing of the data is kept but numbers, names and fingerprints."""
    facts = DataFacts(source.what, whole=source.whole, labels=labels)
    for example in source.examples:
        facts.seen += 1
        if progress is not None:
            progress(facts.seen, source.total if source.whole is not None else None)
        if example.problem:
            facts.unreadable.add(f"{example.name} ({example.problem})")
            continue
        try:
            _take(facts, example)
        except (TypeError, ValueError, RuntimeError, OverflowError) as fault:
            facts.unreadable.add(
                f"{example.name} ({type(fault).__name__}: {' '.join(str(fault).split())[:100]})"
            )
    facts.remarks = source.remarks
    return facts


def _take(facts: DataFacts, example: Example) -> None:
    tensors = dict(as_tensors(example.values))
    _fingerprint(facts, example, tensors)
    label = facts.labels.take(example.name, tensors)
    for key, tensor in tensors.items():
        if key == label and not tensor.is_floating_point():
            facts.columns.setdefault(key, Column()).numbers += 1
        elif tensor.numel():
            _measure(facts, example.name, key, tensor)
    if hasattr(example.values, "items"):
        for key, value in example.values.items():
            if value is None or (isinstance(value, str) and not value):
                facts.columns.setdefault(str(key), Column()).missing.add(example.name)


def _measure(facts: DataFacts, name: str, key: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    real = tensor.is_floating_point()
    column = facts.columns.setdefault(key, Column())
    column.numbers += 1
    column.scalar &= tensor.numel() == 1
    column.whole &= not real or (tensor.numel() == 1 and float(tensor).is_integer())
    low, high = _bounds(tensor)
    if not math.isfinite(low) or not math.isfinite(high):  # a NaN makes both bounds NaN
        facts.nonfinite.add(_bad_place(name, key, tensor))
        return
    column.low, column.high = min(column.low, low), max(column.high, high)
    if real or _is_image(tensor):
        column.largest.append((max(abs(low), abs(high)), name))
        if low == high and tensor.numel() >= LEAST_ELEMENTS:
            facts.constant.add(f"{name}{_of(key)} = {low:g} in all {tensor.numel():,} places")


def _bounds(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.reshape(-1)
    low, high = torch.aminmax(flat.to(torch.uint8) if flat.dtype == torch.bool else flat)
    return float(low), float(high)


def _is_image(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() >= 2


def _bad_place(name: str, key: str, tensor: Tensor) -> str:
    bad = ~torch.isfinite(tensor)
    first = tuple(int(part) for part in bad.nonzero()[0])
    value = float(tensor[first])
    kind = "NaN" if math.isnan(value) else "Inf"
    if tensor.numel() == 1:
        return f"{name}{_of(key)} is {kind}"
    return (
        f"{name}{_of(key)}: {kind} at {list(first)}, {int(bad.sum()):,} of {tensor.numel():,} "
        f"values"
    )


def _of(key: str) -> str:
    return f" [{key}]" if key else ""


def _fingerprint(facts: DataFacts, example: Example, tensors: dict[str, Tensor]) -> None:
    """Of what the model sees: numbers and texts, without the keys that name the example."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        if key.lower() not in _IDENTITIES:
            tensor = tensors[key].contiguous()
            digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(
                tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
                if tensor.numel()
                else b""
            )
    if hasattr(example.values, "items"):
        for key, value in sorted(example.values.items(), key=lambda pair: str(pair[0])):
            if isinstance(value, str) and str(key).lower() not in _IDENTITIES:
                digest.update(f"{key}={value}".encode())
    first = facts.prints.setdefault(digest.digest(), example.name)
    if first != example.name:
        facts.duplicates.add(f"{example.name} = {first}")


_IDENTITIES = frozenset(
    {"id", "idx", "uid", "index", "name", "file", "file_name", "filename", "path"}
)


def overlap(first: DataFacts, second: DataFacts) -> Named:
    """Examples of the second that are in the first as well."""
    shared = Named()
    for print_, name in second.prints.items():
        if print_ in first.prints:
            shared.add(f"{name} = {first.prints[print_]}")
    return shared

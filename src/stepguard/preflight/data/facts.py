"""Facts of one pass over the data: counts, and the names of the first examples of each kind."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepguard.preflight.answers import one_line
from stepguard.preflight.data.examples import NAMING, Example, Source
from stepguard.preflight.data.files import as_tensors
from stepguard.preflight.data.label_facts import LabelFacts
from stepguard.report.phrases import count

KEPT_NAMES = 50
LEAST_ELEMENTS = 16
"""A tensor with fewer elements may be constant by chance."""
LEAST_IDS = 8
"""Of whole numbers in a row: the chance that ids agree is smaller."""
IDENTITIES = frozenset({*NAMING, "index"})
"""Keys that name an example and are not part of its content."""

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
    flat: Named = field(default_factory=Named)
    """Rows of whole numbers that are one value throughout: a text that is all padding."""


@dataclass(slots=True)
class DataFacts:
    """What the items on data and labels judge."""

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

    def column(self, key: str) -> Column:
        return self.columns.setdefault(key, Column())

    @property
    def scope(self) -> str:
        """`512 examples of the dataset`, `the first 8 of 512 examples of the dataset`."""
        if self.whole is not None and self.seen < self.whole:
            return f"the first {self.seen:,} of {self.whole:,} examples of the {self.what}"
        return f"{count(self.seen, 'example')} of the {self.what}"


def gather(source: Source, labels: LabelFacts, progress: Progress | None = None) -> DataFacts:
    """Read everything once; nothing of the data is kept but numbers, names and fingerprints."""
    facts = DataFacts(source.what, whole=source.whole, labels=labels)
    for example in source.examples:
        facts.seen += 1
        if progress is not None:
            progress(facts.seen, source.total)
        if example.problem:
            facts.unreadable.add(f"{example.name} ({example.problem})")
            continue
        try:
            _take(facts, example)
        except (TypeError, ValueError, RuntimeError, OverflowError) as fault:
            facts.unreadable.add(f"{example.name} ({one_line(fault, 100)})")
    facts.remarks = source.remarks
    return facts


def _take(facts: DataFacts, example: Example) -> None:
    tensors = dict(as_tensors(example.values))
    _fingerprint(facts, example, tensors)
    label = facts.labels.take(example.name, tensors)
    for key, tensor in tensors.items():
        if key == label and not tensor.is_floating_point():
            facts.column(key).numbers += 1
        elif tensor.numel():
            _measure(facts, example.name, key, tensor)
    if hasattr(example.values, "items"):
        for key, value in example.values.items():
            if value is None or (isinstance(value, str) and not value):
                facts.column(str(key)).missing.add(example.name)


def _measure(facts: DataFacts, name: str, key: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    real = tensor.is_floating_point()
    single = tensor.numel() == 1
    column = facts.column(key)
    column.numbers += 1
    column.scalar &= single
    column.whole &= not real or (single and float(tensor).is_integer())
    low, high = _bounds(tensor)
    # A NaN makes both bounds NaN.
    if not all(map(math.isfinite, (low, high))):
        facts.nonfinite.add(_bad_place(name, key, tensor))
        return
    column.low = min(column.low, low)
    column.high = max(column.high, high)
    image = tensor.dtype == torch.uint8 and tensor.dim() >= 2
    if real or image:
        column.largest.append((max(abs(low), abs(high)), name))
    measured = real or image
    if low == high and tensor.numel() >= (LEAST_ELEMENTS if measured else LEAST_IDS):
        place = f"{name}{_in_brackets(key)} = {low:g} in all {tensor.numel():,} places"
        if measured:
            facts.constant.add(place)
        elif tensor.dtype != torch.bool:
            column.flat.add(place)


def _bounds(tensor: Tensor) -> tuple[float, float]:
    # aminmax takes no bool.
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    low, high = torch.aminmax(tensor.reshape(-1))
    return float(low), float(high)


def _bad_place(name: str, key: str, tensor: Tensor) -> str:
    bad = ~torch.isfinite(tensor)
    first = bad.nonzero()[0].tolist()
    kind = "Inf"
    if math.isnan(float(tensor[tuple(first)])):
        kind = "NaN"
    place = f"{name}{_in_brackets(key)}"
    if tensor.numel() == 1:
        return f"{place} is {kind}"
    return f"{place}: {kind} at {first}, {int(bad.sum()):,} of {tensor.numel():,} values"


def _in_brackets(key: str) -> str:
    if not key:
        return ""
    return f" [{key}]"


def _fingerprint(facts: DataFacts, example: Example, tensors: dict[str, Tensor]) -> None:
    """Note a digest of what the model sees: numbers and texts, without what names the example."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        if key.lower() not in IDENTITIES:
            tensor = tensors[key].contiguous()
            digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
            # A tensor without elements has no bytes to view.
            if tensor.numel():
                # numpy has no bfloat16, but every dtype is bytes.
                digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    if hasattr(example.values, "items"):
        for key, value in sorted(example.values.items(), key=lambda pair: str(pair[0])):
            if isinstance(value, str) and str(key).lower() not in IDENTITIES:
                digest.update(f"{key}={value}".encode())
    first = facts.prints.setdefault(digest.digest(), example.name)
    if first != example.name:
        facts.duplicates.add(f"{example.name} = {first}")


def overlap(first: DataFacts, second: DataFacts) -> Named:
    """Examples of the second that are in the first as well."""
    shared = Named()
    for fingerprint, name in second.prints.items():
        if fingerprint in first.prints:
            shared.add(f"{name} = {first.prints[fingerprint]}")
    return shared

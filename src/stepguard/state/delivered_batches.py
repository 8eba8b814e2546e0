"""The last batches a loader delivered, found again by the tensors they are made of. Nothing is kept
alive for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stepguard.state.sample_indices import Index, Overheard, as_indices

REMEMBERED = 256
"""Batches. A step has rarely more micro-batches, and a fused one is read one step late."""
MOST_TENSORS, MOST_LOOKED_AT = 4, 32
"""Of one batch: enough to know it again, and little enough to cost nothing."""
ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class Delivered:
    """One batch that was handed to the loop."""

    epoch: int
    number: int
    """In its pass, from 0."""
    step: int
    """The step that was next when it was delivered."""
    raw: Any
    """What the sampler yielded for it."""
    dataset: Any
    marks: tuple[weakref.ref[Tensor], ...]

    @property
    def indices(self) -> tuple[Index, ...] | None:
        return as_indices(self.raw, self.dataset)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of its first tensors that somebody still holds."""
        return [tensor for tensor in (mark() for mark in self.marks) if tensor is not None]


@dataclass(frozen=True, slots=True)
class Found:
    """A batch known again: as a whole, or some of its rows."""

    delivered: Delivered
    rows: tuple[int, ...] | None = None
    """Where the batch asked about is a part: the rows it has; None where it is the whole."""
    of: int | None = None
    """Rows of the whole, where a part was asked about."""

    @property
    def indices(self) -> tuple[Index, ...] | None:
        indices = self.delivered.indices
        if indices is None or self.rows is None or len(indices) == 1:
            return indices
        return tuple(indices[row] for row in self.rows) if len(indices) == self.of else None


class Recent:
    """Remembers the last batches by weak references."""

    def __init__(self) -> None:
        self._batches: deque[Delivered] = deque(maxlen=REMEMBERED)

    def add(self, batch: Any, epoch: int, number: int, step: int, heard: Overheard) -> None:
        try:
            marks = tuple(weakref.ref(tensor) for tensor in first_tensors(batch))
        except (
            Exception
        ):  # an object with ideas of its own: its batch is not known again, and the loop goes on
            marks = ()
        self._batches.append(Delivered(epoch, number, step, heard.raw, heard.dataset, marks))

    def find(self, batch: Any) -> Found | None:
        """Which one is it, or a part of? None where none is, or where several might be."""
        asked = {id(tensor) for tensor in first_tensors(batch)}
        scored = [
            (sum(id(tensor) in asked for tensor in each.tensors), each) for each in self._batches
        ]
        best = max((score for score, _ in scored), default=0)
        if best:
            matching = [each for score, each in scored if score == best]
            return Found(matching[0]) if len(matching) == 1 else None
        return self._part(batch)

    def of_step(self, step: int) -> list[Delivered]:
        """What was delivered for this step, in order; after a rewind, the newer of two."""
        found: list[Delivered] = []
        for each in reversed(self._batches):
            if each.step == step:
                found.append(each)
            elif found:
                break
        return found[::-1]

    def _part(self, batch: Any) -> Found | None:
        """A slice of a delivered tensor, as loops cut their batches into micro-batches."""
        for tensor in first_tensors(batch):
            for each in reversed(self._batches):
                for whole in each.tensors:
                    rows = _rows_of(tensor, whole)
                    if rows is not None:
                        return Found(each, rows, int(whole.shape[0]))
        return None


def _rows_of(part: Tensor, whole: Tensor) -> tuple[int, ...] | None:
    """Which rows of `whole` the view `part` is made of; None where it is no such view."""
    plain = all(t.layout is torch.strided and t.dim() and not t.is_nested for t in (part, whole))
    if not plain or part.shape[1:] != whole.shape[1:] or not part.numel():
        return None
    if (
        part.device != whole.device
        or part.untyped_storage()._cdata != whole.untyped_storage()._cdata
    ):
        return None
    every = whole.stride(0)
    start, apart = divmod(int(part.storage_offset()) - int(whole.storage_offset()), every or 1)
    if not every or apart or part.stride()[1:] != whole.stride()[1:] or part.stride(0) % every:
        return None
    rows = tuple(start + row * (part.stride(0) // every) for row in range(part.shape[0]))
    inside = min(rows) >= 0 and max(rows) < whole.shape[0]
    return rows if inside else None


def first_tensors(batch: Any) -> list[Tensor]:
    """The first tensors of a batch, whatever it is made of. Runs no code of the user's classes."""
    found: list[Tensor] = []
    waiting, looked_at = deque([batch]), 0
    while waiting and len(found) < MOST_TENSORS and looked_at < MOST_LOOKED_AT:
        item, looked_at = waiting.popleft(), looked_at + 1
        kind = type(item)
        if kind in ATOMS:
            continue
        if issubclass(kind, Tensor):
            found.append(item)
        else:
            waiting.extend(_inside(item, kind))
    return found


def _inside(item: Any, kind: type) -> list[Any]:
    """Direct parts of a container, read past methods that its class may have overridden."""
    if issubclass(kind, dict):
        return list(islice(dict.values(item), MOST_LOOKED_AT))
    if issubclass(kind, list | tuple):
        entries = list.__iter__(item) if issubclass(kind, list) else tuple.__iter__(item)
        few = list(islice(entries, MOST_LOOKED_AT))
        return (
            few if few and type(few[0]) not in ATOMS else []
        )  # a list of names is long and holds no tensor
    if issubclass(kind, type) or kind.__module__ == "builtins":
        return []
    if is_dataclass(kind):
        return [object.__getattribute__(item, field.name) for field in fields(kind)]
    try:
        return list(islice(object.__getattribute__(item, "__dict__").values(), MOST_LOOKED_AT))
    except AttributeError:
        return []

"""Are rows that are evaluated also trained on? Batches that DataLoaders deliver are compared while
they pass: by the values of their rows and, for parts of one data set, by the indices of its rows.
Nothing is read from a loader, and of a row only a digest is kept.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from stepguard.diagnose.case import OverlapFacts
from stepguard.engine.context import Context
from stepguard.state.batch import named_tensors
from stepguard.state.loader import as_indices

MOST_TRAINED, MOST_EVALUATED = 1 << 16, 1 << 12
"""Rows that are remembered; a larger data set shares as large a part of those."""
FREE_SECONDS, SHARE = 0.25, 0.005
"""Time that training rows may cost, and its share of the run after that."""
MOST_COLUMNS = 512
"""Values of a row that are compared, spread over it."""
PASSES = 8
"""Passes that are remembered; evaluations before them are judged already, or never will be."""
LEAST_ROWS, LEAST_SHARE = 8, 0.02
"""Shared rows that are worth a word: public data sets share a few in a thousand."""
CHANCE = 2.0
"""How many times the share of training rows that another training row equals: so many rows are
shared by any two samples of data with few values."""
WHOLE = 0.9
"""Share of an evaluation that is trained on, beside that of the training data which is remembered,
from which it may be meant to measure just that."""


@dataclass(slots=True)
class Rows:
    """What one iterator of a DataLoader has delivered."""

    dataset: int
    first_step: int
    last_step: int
    evaluates: bool
    """The model was in evaluation mode, or gradients were off, at every delivery."""
    keys: list[tuple[Any, ...]] = field(default_factory=list)
    """Digest of every row and, where known, its index in the data set that it is a part of."""
    kept: int = 0
    """Keys that were taken over into what has been trained on."""

    @property
    def trains(self) -> bool:
        """A training goes on for several steps, an evaluation comes between two."""
        return self.last_step > self.first_step


class Overlap:
    """Remembers the rows of a training and of its evaluations."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.facts: OverlapFacts | None = None
        self._passes: dict[int, Rows] = {}
        """By the identity of the iterator."""
        self._over: deque[Rows] = deque(maxlen=PASSES)
        self._trained: dict[Any, int] = {}
        """Digest or index -> step before which the row was delivered for training."""
        self._trained_sets: dict[int, weakref.ref[Any]] = {}
        """By identity; the iterator that delivered rows of it last."""
        self._trained_rows = 0
        self._distinct = 0
        """Digests among them."""
        self._counted, self._usual = 0, 0.0
        """Rows of the longest pass of a training, and the share that another row of it equals."""
        self._normalises = any(
            isinstance(one, nn.modules.batchnorm._NormBase)
            for root in context.roots.values()
            for one in root.modules()
        )
        self._bases: dict[int, weakref.ref[Any]] = {}
        """Data sets by identity: one that is gone may have left it to another."""
        self._began, self._spent = time.perf_counter(), 0.0
        self._others: deque[int] = deque(maxlen=PASSES)
        """Evaluated data sets with rows that are not trained on."""

    def delivered(self, iterator: Any, raw: Any, batch: Any, step: int) -> None:
        """A DataLoader has delivered a batch."""
        if self.facts is not None:
            return
        model = self._context.roots[""]
        # batch norms measure their statistics on training data without gradients, in training mode
        evaluates = not (model.training and (torch.is_grad_enabled() or self._normalises))
        number = id(iterator)
        rows = self._passes.get(number)
        if rows is None or iterator._num_yielded <= 1:
            if rows is not None:
                self._ended(number)  # the new iterator has its place in memory
            while len(self._passes) >= PASSES:
                self._ended(next(iter(self._passes)))
            rows = Rows(id(iterator._dataset), step, step, evaluates)
            self._passes[number] = rows
        rows.last_step = step
        rows.evaluates &= evaluates
        began = time.thread_time()
        full = self._trained_rows >= MOST_TRAINED
        full |= self._spent > FREE_SECONDS + SHARE * (time.perf_counter() - self._began)
        if len(rows.keys) - rows.kept < MOST_EVALUATED and (evaluates or not full):
            rows.keys += row_keys(batch, self._places(iterator._dataset, raw))
            self._spent += time.thread_time() - began
        if rows.trains:
            self._take(rows, step)
            self._trained_sets[rows.dataset] = weakref.ref(iterator)

    def _places(self, dataset: Any, raw: Any) -> list[Any]:
        """Rows of the whole data set that this batch of a part of it holds."""
        base, indices = dataset, as_indices(raw, dataset) if type(dataset) is Subset else None
        while type(base) is Subset:
            base = base.dataset
        with suppress(TypeError):  # a list, which cannot be told from the next one in its place
            known = self._bases.setdefault(id(base), weakref.ref(base))
            if indices and known() is base:
                return [(id(base), index) for index in indices]
        return []

    def _take(self, rows: Rows, step: int) -> None:
        """Take over what was delivered for training."""
        for key in rows.keys[rows.kept :]:
            self._distinct += key[0] not in self._trained
            for part in key:
                self._trained.setdefault(part, step)
        self._trained_rows += len(rows.keys) - rows.kept
        rows.kept = len(rows.keys)

    def _ended(self, number: int) -> None:
        rows = self._passes.pop(number)
        if not rows.trains:
            self._over.append(rows)
        self._count(rows)

    def _count(self, rows: Rows) -> None:
        """Count what repeats by itself, in data of few values or with rows that are there twice."""
        if rows.trains and len(rows.keys) > self._counted:
            counts = Counter(key[0] for key in rows.keys)
            alike = sum(number for number in counts.values() if number > 1)
            self._counted, self._usual = len(rows.keys), alike / len(rows.keys)

    def judge(self) -> OverlapFacts | None:
        """Judge the evaluations that are over."""
        for number, rows in list(self._passes.items()):
            if not rows.trains and rows.last_step < self._context.step:
                self._ended(number)
        if self._over and self._trained_rows and self.facts is None:
            for rows in self._passes.values():
                self._count(rows)
            evaluations = [one for one in self._over if one.evaluates]
            self._over.clear()
            # those with few training rows show that the others are not all that is evaluated
            for rows in sorted(evaluations, key=self._shared):
                self._judge(rows)
        return self.facts

    def _shared(self, rows: Rows) -> int:
        """Rows that had been trained on: those of a stream are evaluated first."""
        known = self._trained
        shared = 0
        for key in rows.keys:
            shared += any(known.get(part, rows.first_step) < rows.first_step for part in key)
        return shared

    def _judge(self, rows: Rows) -> None:
        shared = self._shared(rows)
        # the more rows there are, the more of them are equal
        usual = self._usual * max(1.0, self._distinct / max(self._counted, 1))
        share = shared / max(len(rows.keys), 1)
        few = shared < LEAST_ROWS or share < LEAST_SHARE + CHANCE * usual
        known = self._remembered()
        chance = 3.0 * math.sqrt(known * (1.0 - known) / max(len(rows.keys), 1))
        whole = not few and share >= WHOLE * known - chance
        if not whole:
            self._others.append(rows.dataset)
        # the training set, or a part of it, is evaluated beside other data on purpose
        if not (few or rows.dataset in self._trained_sets or (whole and self._others)):
            self.facts = OverlapFacts(
                shared=shared,
                rows=len(rows.keys),
                step=rows.first_step,
                trained=self._trained_rows,
                whole=whole,
            )

    def _remembered(self) -> float:
        """The part of the training data that was delivered and remembered so far, about."""
        rows = 0
        for found in self._trained_sets.values():
            with suppress(Exception):  # a data set without a length
                rows += len(found()._dataset)  # type: ignore[union-attr]
        return min(1.0, self._trained_rows / max(rows, 1))


def row_keys(batch: Any, places: list[Any]) -> list[tuple[Any, ...]]:
    """A digest of the values of each row, and its place; nothing for a batch without equal rows."""
    tensors = {name: one.detach() for name, one in named_tensors(batch) if one.dim()}
    sizes = {len(one) for one in tensors.values()}
    for one in tensors.values():
        if type(one) is not Tensor or one.device.type != "cpu" or one.layout is not torch.strided:
            return []
    if len(sizes) != 1 or not all(sizes):
        return []
    (count,) = sizes
    with torch.no_grad():
        found = _of_tokens(tensors)
        digests = (_of_values(tensors, count) if found is None else found).tolist()
    if len(places) != count:
        return [(digest,) for digest in digests]
    return list(zip(digests, places, strict=True))


def _of_values(tensors: dict[str, Tensor], count: int) -> Tensor:
    parts = []
    for _, one in sorted(tensors.items()):
        flat = one.reshape(count, -1)
        flat = flat[:, :: -(-flat.shape[1] // MOST_COLUMNS) or 1].contiguous()
        parts.append(flat.view(torch.uint8).reshape(count, -1))
    width = sum(part.shape[1] for part in parts)
    parts.append(torch.zeros(count, -width % 8, dtype=torch.uint8))
    mixed = _mixed(torch.cat(parts, 1).view(torch.int64))
    return (mixed * _odd(torch.arange(mixed.shape[1]))).sum(1)


def _of_tokens(tensors: dict[str, Tensor]) -> Tensor | None:
    """Digests of tokens without their padding, which is as long as the batch needs."""
    named = {name.rpartition(".")[2].rpartition(":")[2]: one for name, one in tensors.items()}
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    if ids is None or mask is None or ids.shape != mask.shape or ids.dim() != 2:
        return None
    kept = mask != 0
    return torch.where(kept, _mixed(ids.long() + 1) * _odd(kept.cumsum(1)), 0).sum(1)


def _mixed(words: Tensor) -> Tensor:
    """Spread every bit of a word over it: sums of products alone would lose sign bits."""
    words = (words ^ (words >> 32)) * -7046029254386353131
    return words ^ (words >> 29)


def _odd(places: Tensor) -> Tensor:
    """An odd factor for each place."""
    return _mixed(places + 1) | 1

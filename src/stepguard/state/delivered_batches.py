"""Find a batch again among the last ones a loader delivered, by the tensors it is made of.

Only weak references are kept: no batch stays in memory for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from stepguard.state.sample_indices import Index, as_indices
from stepguard.tensors.torch_private import NEXT_INDEX, LoaderIterator

REMEMBERED = 256
"""Batches. A step has rarely more micro-batches, and a fused one is read one step late."""
MOST_TENSORS = 4
"""Tensors of one batch: enough to find it again."""
MOST_PARTS = 32
"""Parts of one batch that are searched for tensors."""
NEXT = "__next__"
ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class Delivered:
    """One batch that was handed to the loop."""

    epoch: int | None
    """Pass over the data; None where the loader is not the guard's."""
    number: int
    """In its pass, from 0."""
    step: int
    """The step that was next when it was delivered."""
    raw: Any
    """What the sampler yielded for it."""
    dataset: Any
    marks: tuple[weakref.ref[Tensor], ...]

    @property
    def place(self) -> tuple[int, int] | None:
        """The pass and the number in it."""
        return None if self.epoch is None else (self.epoch, self.number)

    @property
    def indices(self) -> tuple[Index, ...] | None:
        return as_indices(self.raw, self.dataset)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of its first tensors that are still in memory."""
        alive = (mark() for mark in self.marks)
        return [tensor for tensor in alive if tensor is not None]


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A delivered batch found again, or some of its rows."""

    delivered: Delivered
    rows: tuple[int, ...] | None = None
    """The rows of a part; None for the whole batch."""
    of: int | None = None
    """Rows of the whole batch, for a part."""

    @property
    def indices(self) -> tuple[Index, ...] | None:
        indices = self.delivered.indices
        if indices is None or self.rows is None or len(indices) == 1:
            return indices
        if len(indices) != self.of:
            return None
        return tuple(indices[row] for row in self.rows)


class RecentBatches:
    """Remembers the last batches by weak references."""

    def __init__(self, step: Callable[[], int], *, observed: bool = False) -> None:
        """`step` tells which one a batch is delivered for. `observed`: the batches come from any
        loader of the process, perhaps ahead of their step.
        """
        self.step = step
        self.observed = observed
        self._batches: deque[Delivered] = deque(maxlen=REMEMBERED)

    def add(self, batch: Any, epoch: int | None, number: int, raw: Any, dataset: Any) -> None:
        """Remember a batch that is being delivered; `raw` is what the sampler yielded for it."""
        try:
            marks = tuple(weakref.ref(tensor) for tensor in first_tensors(batch))
        except Exception:
            # A batch of a strange class is not found again; the loop must not fail for it.
            marks = ()
        self._batches.append(Delivered(epoch, number, self.step(), raw, dataset, marks))

    def find(self, batch: Any) -> FoundBatch | None:
        """Find the delivered batch this is, or is a part of; None if there is none or several."""
        asked = {id(tensor) for tensor in first_tensors(batch)}
        best = 0
        matching: list[Delivered] = []
        for each in self._batches:
            score = sum(id(tensor) in asked for tensor in each.tensors)
            if score > best:
                best = score
                matching = [each]
            elif score and score == best:
                matching.append(each)
        if not best:
            return self._find_part(batch)
        if len(matching) > 1:
            return None
        return FoundBatch(matching[0])

    def of_step(self, step: int) -> list[Delivered]:
        """List what was delivered for this step, in order; after a rewind, the newer ones."""
        found: list[Delivered] = []
        for each in reversed(self._batches):
            if each.step == step:
                found.append(each)
            elif found:
                break
        return found[::-1]

    def _find_part(self, batch: Any) -> FoundBatch | None:
        """Find a slice of a delivered tensor, as loops cut their batches into micro-batches."""
        for tensor in first_tensors(batch):
            for each in reversed(self._batches):
                for whole in each.tensors:
                    rows = _rows_of(tensor, whole)
                    if rows is not None:
                        return FoundBatch(each, rows, int(whole.shape[0]))
        return None


def _rows_of(part: Tensor, whole: Tensor) -> tuple[int, ...] | None:
    """Return which rows of `whole` the view `part` is made of; None if it is not such a view."""
    if not _can_be_rows(part, whole):
        return None
    row_size = whole.stride(0)
    offset = int(part.storage_offset()) - int(whole.storage_offset())
    if not row_size or offset % row_size or part.stride(0) % row_size:
        return None
    start = offset // row_size
    every = part.stride(0) // row_size
    rows = tuple(start + row * every for row in range(part.shape[0]))
    if min(rows) < 0 or max(rows) >= whole.shape[0]:
        return None
    return rows


def _can_be_rows(part: Tensor, whole: Tensor) -> bool:
    if not _has_rows(part) or not _has_rows(whole) or not part.numel():
        return False
    if part.shape[1:] != whole.shape[1:] or part.stride()[1:] != whole.stride()[1:]:
        return False
    return _share_memory(part, whole)


def _has_rows(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dim() > 0 and not tensor.is_nested


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device:
        return False
    # Python makes a new storage object on every call; _cdata is the address of the real one.
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def first_tensors(batch: Any) -> list[Tensor]:
    """List the first tensors of a batch. Runs no code of the user's classes."""
    found: list[Tensor] = []
    waiting = deque([batch])
    searched = 0
    while waiting and len(found) < MOST_TENSORS and searched < MOST_PARTS:
        item = waiting.popleft()
        searched += 1
        kind = type(item)
        if kind in ATOMS:
            continue
        if issubclass(kind, Tensor):
            found.append(item)
        else:
            waiting.extend(_parts(item, kind))
    return found


def _parts(item: Any, kind: type) -> list[Any]:
    """List direct parts of a container, past methods that its class may have overridden."""
    if issubclass(kind, dict):
        return list(islice(dict.values(item), MOST_PARTS))
    if issubclass(kind, list):
        return _entries(list.__iter__(item))
    if issubclass(kind, tuple):
        return _entries(tuple.__iter__(item))
    if issubclass(kind, type) or kind.__module__ == "builtins":
        return []
    if is_dataclass(kind):
        return [object.__getattribute__(item, field.name) for field in fields(kind)]
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return []
    return list(islice(attributes.values(), MOST_PARTS))


def _entries(iterator: Any) -> list[Any]:
    few = list(islice(iterator, MOST_PARTS))
    # A list of names is long and holds no tensor.
    if not few or type(few[0]) in ATOMS:
        return []
    return few


# --- loaders that were not given to a guard


_plain: dict[str, Any] = {}
"""The methods that are wrapped, as they were."""
_listening: weakref.WeakSet[RecentBatches] = weakref.WeakSet()
_yielded: weakref.WeakKeyDictionary[Any, deque[Any] | None] = weakref.WeakKeyDictionary()
"""Iterator of a DataLoader -> what its sampler yielded for batches that are not delivered yet; None
where some of it was not seen.
"""


def observe_loaders(step: Callable[[], int]) -> RecentBatches:
    """Remember what every DataLoader of the process delivers, until `stop_observing`.

    `step` tells which step a batch is delivered for. Two methods of torch's iterators are wrapped
    while anyone listens: loaders, samplers, workers and random numbers stay as they are.
    """
    recent = RecentBatches(step, observed=True)
    _listening.add(recent)
    for name, wrapper in ((NEXT, _deliver), (NEXT_INDEX, _fetch_index)):
        if name not in _plain:
            _plain[name] = getattr(LoaderIterator, name)
            setattr(LoaderIterator, name, wrapper)
    return recent


def stop_observing(recent: RecentBatches) -> None:
    """Undo `observe_loaders`."""
    _listening.discard(recent)
    if _listening:
        return
    _yielded.clear()
    for name, wrapper in ((NEXT, _deliver), (NEXT_INDEX, _fetch_index)):
        # another tool may have wrapped it in turn: then it stays, and only passes on
        if getattr(LoaderIterator, name) is wrapper:
            setattr(LoaderIterator, name, _plain.pop(name))


def _fetch_index(iterator: Any) -> Any:
    index = _plain[NEXT_INDEX](iterator)
    if not _listening:
        return index
    if not getattr(iterator, "_send_idx", 0):
        # the first one of a pass, or each where no worker fetches ahead
        _yielded[iterator] = deque()
    waiting = _yielded.setdefault(iterator, None)
    if waiting is not None:
        # a copy of a list: a sampler may fill the same one again
        waiting.append(tuple(index) if isinstance(index, list) else index)
    return index


def _deliver(iterator: Any) -> Any:
    try:
        batch = _plain[NEXT](iterator)
    except StopIteration:
        raise
    except BaseException:
        _take(iterator)  # the batch that a worker failed on
        raise
    raw = _take(iterator)
    dataset = getattr(iterator, "_dataset", None)
    if raw is None or isinstance(dataset, IterableDataset):
        return batch
    for recent in list(_listening):
        # only a part of a data set is asked for its rows of the whole
        recent.add(batch, None, 0, raw, dataset if type(dataset) is Subset else None)
    return batch


def _take(iterator: Any) -> Any:
    """What the sampler yielded for the batch that is delivered now; None where not known."""
    waiting = _yielded.get(iterator)
    if not waiting or not getattr(iterator, "_in_order", True):
        return None
    return waiting.popleft()

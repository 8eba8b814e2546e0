"""Observe from the loader's sampler which samples of the data set a batch is made of.

The sampler is wrapped only while the loader makes its iterator; what it yields is passed on as it
is, so order, content and random numbers are those of the bare loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

PLAIN_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
"""Modules whose `__iter__` delivers exactly one batch for each list of indices, in order."""

Index = int | str
Yielded = deque[Any]


class IndexObserver:
    """Iterates over a loader; `indices` are those of the last batch, None if not known."""

    def __init__(self, loader: Any) -> None:
        self._yielded: Yielded = deque()
        self._last: Any = None
        self.dataset = getattr(loader, "dataset", None)
        self._ahead = getattr(loader, "num_workers", 0) > 0
        """Workers fetch batches ahead: the sampler has yielded more than was delivered."""
        self._iterator: Iterator[Any]
        if _can_be_observed(loader):
            self._iterator = self._observing(loader)
        else:
            self._iterator = iter(loader)

    def __iter__(self) -> IndexObserver:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            # One fetch a batch; there are more only if a loader went forward to its position.
            self._yielded.clear()
        batch = next(self._iterator)
        self._last = None
        if self._yielded:
            self._last = self._yielded.popleft() if self._ahead else self._yielded[-1]
        return batch

    @property
    def indices(self) -> tuple[Index, ...] | None:
        """Indices of the last batch. Waits for the device only if a sampler yields its tensors."""
        return as_indices(self._last, self.dataset)

    @property
    def raw(self) -> Any:
        """What the sampler yielded for the last batch, as it is."""
        return self._last

    def _observing(self, loader: Any) -> Iterator[Any]:
        name = _sampler_name(loader)
        sampler = getattr(loader, name)
        observed = _Sampler(sampler, self._yielded)
        # Persistent workers have one iterator, which is reset for each pass.
        persistent = getattr(loader, "_iterator", None)
        # The loader's own __setattr__ refuses to replace a sampler.
        vars(loader)[name] = observed
        _exchange(persistent, sampler, observed)
        try:
            iterator: Iterator[Any] = iter(loader)
        finally:
            vars(loader)[name] = sampler
            _exchange(persistent, observed, sampler)
        _exchange(iterator, observed, sampler)
        if self._ahead:
            self._drop_delivered(iterator)
        return iterator

    def _drop_delivered(self, iterator: Any) -> None:
        """Drop what a loader that went forward to its position will not deliver."""
        sent = getattr(iterator, "_send_idx", None)
        received = getattr(iterator, "_rcvd_idx", None)
        if not isinstance(sent, int) or not isinstance(received, int):
            self._yielded = deque(maxlen=0)
            return
        while len(self._yielded) > sent - received:
            self._yielded.popleft()


class _Sampler:
    """Passes on what a sampler yields, and remembers it."""

    def __init__(self, sampler: Any, yielded: Yielded) -> None:
        self._sampler = sampler
        self._yielded = yielded

    def __iter__(self) -> Iterator[Any]:
        self._yielded.clear()
        iterator = iter(self._sampler)
        if keeps_position(iterator):
            return _StatefulIndices(iterator, self._yielded)
        return _Indices(iterator, self._yielded)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Indices:
    def __init__(self, iterator: Iterator[Any], yielded: Yielded) -> None:
        self._iterator = iterator
        self._yielded = yielded

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        indices = next(self._iterator)
        # A copy of a list: a sampler may fill the same one again.
        self._yielded.append(tuple(indices) if isinstance(indices, list) else indices)
        return indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class _StatefulIndices(_Indices):
    """torchdata checks the class to find out whether an iterator keeps its own position."""

    def state_dict(self) -> Any:
        return self._iterator.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self._iterator.load_state_dict(state)  # type: ignore[attr-defined]


def as_indices(given: Any, dataset: Any = None) -> tuple[Index, ...] | None:
    """Return what a sampler yielded for one batch as plain values; None for anything else.

    Those of a part made by `Subset` or `random_split` are its rows of the whole.
    """
    given = _as_python(given)
    several = given if isinstance(given, list | tuple | range) else (given,)
    found = tuple(_as_python(index) for index in several)
    if not all(map(_is_index, found)):
        return None
    while type(dataset) is Subset:
        rows = dataset.indices
        if not all(_is_row(index, len(rows)) for index in found):
            return None
        found = tuple(_as_python(rows[index]) for index in found)
        dataset = dataset.dataset
    return found


def keeps_position(loader: Any) -> bool:
    """True for a loader or iterator with `state_dict` and `load_state_dict`."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_index(value: Any) -> bool:
    # A bool is an int for Python, and never an index.
    return isinstance(value, int | str) and not isinstance(value, bool)


def _is_row(index: Any, count: int) -> bool:
    return isinstance(index, int) and -count <= index < count


def _as_python(value: Any) -> Any:
    """Turn tensors, arrays and numbers of numpy into numbers and lists."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return value


def _can_be_observed(loader: Any) -> bool:
    """True if the data set has indices and batches are delivered in the sampler's order."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__.__module__ not in PLAIN_LOADERS:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return False
    in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
    return in_order and _sampler_name(loader) in vars(loader)


def _sampler_name(loader: Any) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _exchange(iterator: Any, old: Any, new: Any) -> None:
    """Replace the sampler that the loader's iterator keeps for its length and the next pass."""
    if getattr(iterator, "_index_sampler", None) is old:
        iterator._index_sampler = new

"""Which samples of the data set a batch is made of, overheard from the loader's sampler.

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
Heard = deque[Any]


class Overheard:
    """Iterates over a loader; `indices` are those of the last batch, None where nobody knows."""

    def __init__(self, loader: Any) -> None:
        self._heard: Heard = deque()
        self._last: Any = None
        self.dataset = getattr(loader, "dataset", None)
        self._ahead = getattr(loader, "num_workers", 0) > 0
        self._iterator: Iterator[Any] = (
            iter(loader) if not _can_be_heard(loader) else self._listening(loader)
        )

    def __iter__(self) -> Overheard:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            # one fetch a batch; more were heard where a loader went forward to its position
            self._heard.clear()
        batch = next(self._iterator)
        self._last = None
        if self._heard:
            self._last = self._heard.popleft() if self._ahead else self._heard[-1]
        return batch

    @property
    def indices(self) -> tuple[Index, ...] | None:
        """Waits for the device only where the user's sampler yields tensors on one."""
        return as_indices(self._last, self.dataset)

    @property
    def raw(self) -> Any:
        """The same, not yet looked at."""
        return self._last

    def _listening(self, loader: Any) -> Iterator[Any]:
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = getattr(loader, name)
        heard = _Sampler(sampler, self._heard)
        kept = getattr(
            loader, "_iterator", None
        )  # of persistent workers: made once, reset for each pass
        vars(loader)[name] = heard  # the loader's own __setattr__ refuses
        _exchange(kept, sampler, heard)
        try:
            iterator: Iterator[Any] = iter(loader)
        finally:
            vars(loader)[name] = sampler
            _exchange(kept, heard, sampler)
        _exchange(iterator, heard, sampler)
        if self._ahead:
            self._drop_what_was_delivered(iterator)
        return iterator

    def _drop_what_was_delivered(self, iterator: Any) -> None:
        """A loader that went forward to its position has heard more than it will deliver."""
        sent, received = getattr(iterator, "_send_idx", None), getattr(iterator, "_rcvd_idx", None)
        if not isinstance(sent, int) or not isinstance(received, int):
            self._heard = deque(maxlen=0)
            return
        while len(self._heard) > sent - received:
            self._heard.popleft()


class _Sampler:
    """Passes on what a sampler yields, and remembers it."""

    def __init__(self, sampler: Any, heard: Heard) -> None:
        self._sampler, self._heard = sampler, heard

    def __iter__(self) -> Iterator[Any]:
        self._heard.clear()
        iterator = iter(self._sampler)
        stateful = all(
            callable(getattr(iterator, name, None)) for name in ("state_dict", "load_state_dict")
        )
        return (_StatefulIndices if stateful else _Indices)(iterator, self._heard)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Indices:
    def __init__(self, iterator: Iterator[Any], heard: Heard) -> None:
        self._iterator, self._heard = iterator, heard

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        indices = next(self._iterator)
        # a copy of a list: a sampler may fill the same one again
        self._heard.append(tuple(indices) if isinstance(indices, list) else indices)
        return indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class _StatefulIndices(_Indices):
    """torchdata asks the class whether an iterator keeps its own position."""

    def state_dict(self) -> Any:
        return self._iterator.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self._iterator.load_state_dict(state)  # type: ignore[attr-defined]


def as_indices(given: Any, dataset: Any = None) -> tuple[Index, ...] | None:
    """What a sampler yielded for one batch as plain values; None where it is something else.

    Those of a part made by `Subset` or `random_split` are its rows of the whole.
    """
    given = _as_python(given)
    several = given if isinstance(given, list | tuple | range) else (given,)
    found = tuple(_as_python(index) for index in several)
    plain = all(isinstance(index, int | str) and not isinstance(index, bool) for index in found)
    if not plain:
        return None
    while type(dataset) is Subset:
        rows = dataset.indices
        if not all(isinstance(index, int) and -len(rows) <= index < len(rows) for index in found):
            return None
        found = tuple(_as_python(rows[index]) for index in found)
        dataset = dataset.dataset
    return found


def _as_python(value: Any) -> Any:
    """Tensors, arrays and numbers of numpy as numbers and lists."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _can_be_heard(loader: Any) -> bool:
    """A loader of a data set with indices, that delivers its batches in the sampler's order."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__.__module__ not in PLAIN_LOADERS:
        return False
    in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
    if isinstance(loader.dataset, IterableDataset) or not in_order:
        return False
    return ("batch_sampler" if loader.batch_sampler is not None else "sampler") in vars(loader)


def _exchange(iterator: Any, old: Any, new: Any) -> None:
    """The loader's iterator keeps the sampler as well, for its length and the next pass."""
    if getattr(iterator, "_index_sampler", None) is old:
        iterator._index_sampler = new

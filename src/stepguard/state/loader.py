"""Find a batch again among the last ones a loader delivered, by the tensors it is made of.

Only weak references are kept: no batch stays in memory for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_from_facts, rng_to_facts
from stepguard.tensors.torch_private import NEXT_INDEX, LoaderIterator

# --- Observe from the loader's sampler which samples of the data set a batch is made of.


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


# --- Find a batch again among the last ones a loader delivered, by the tensors it is made of.


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


# --- Batches that were left out before and are not delivered again.


Place = tuple[int, int]
"""A pass over the data and the number of a batch in it, both from 0."""


class Batch(Protocol):
    @property
    def indices(self) -> tuple[Index, ...] | None: ...


class SkippedBatches:
    """Knows which batches not to deliver, and says so once for each stretch of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._places: frozenset[Place] = frozenset()
        self._causes: Mapping[Place, str] = {}
        self._indices: Mapping[Place, Collection[Index]] = {}
        self._epoch = 0
        self._stretch: list[Place] = []

    def expect(
        self,
        places: Collection[Place],
        epoch: int,
        causes: Mapping[Place, str],
        indices: Mapping[Place, Collection[Index]],
    ) -> None:
        """`epoch` is the pass whose order of batches is known to be the same as before."""
        self._places = frozenset(places)
        self._epoch = epoch
        self._causes = causes
        self._indices = indices

    def skips(self, place: Place, batch: Batch) -> bool:
        """Is this a batch that must not be delivered?"""
        if place in self._places and self._is_the_same(place, batch):
            self._stretch.append(place)
            return True
        self.tell()
        return False

    def _is_the_same(self, place: Place, batch: Batch) -> bool:
        expected = self._indices.get(place)
        indices = batch.indices
        if not expected or indices is None:
            return place[0] == self._epoch
        return set(expected) <= set(indices)

    def tell(self) -> None:
        """Say one line on the stretch that has ended."""
        stretch = self._stretch
        self._stretch = []
        if not stretch:
            return
        epoch, first = stretch[0]
        _, last = stretch[-1]
        which = f"batch {first}" if first == last else f"batches {first}-{last}"
        line = f"passing over {which} of pass {epoch}: left out before"
        # A dict keeps the order and names each cause once.
        causes = dict.fromkeys(self._causes[place] for place in stretch if place in self._causes)
        if causes:
            line += f" as {', '.join(causes)}"
        self._say(line)


# --- The user's loader, with a position that can be saved and restored.


class ResumableLoader:
    """Iterate over this instead of the loader. `between` is called before each batch."""

    def __init__(
        self,
        loader: Any,
        between: Callable[[], None],
        say: Callable[[str], None],
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        """`step` tells which step a batch is delivered for."""
        self._loader = loader
        self._between = between
        self._say = say
        self.recent = RecentBatches(step)
        self._skipped = SkippedBatches(say)
        self._begun: dict[str, Any] | None = None
        """What the present pass over the data began with; None outside of one."""
        self._goal: tuple[dict[str, Any], RngState | None] | None = None
        self.after_pass: list[Callable[[], None]] = []
        """Called when a pass has come to its end."""
        self.epoch = 0
        """Whole passes over the data so far."""
        self.delivered = 0
        """Batches of the present pass."""

    def __iter__(self) -> Iterator[Any]:
        if self._goal is None:
            iterator = self._from_start()
        else:
            iterator = self._from_position(*self._goal)
            self._goal = None
        while True:
            self._between()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            number = self.delivered
            self.delivered += 1
            if self._skipped.skips((self.epoch, number), iterator):
                continue
            self.recent.add(batch, self.epoch, number, iterator.raw, iterator.dataset)
            yield batch
        self._skipped.tell()
        self._begun = None
        self.delivered = 0
        self.epoch += 1
        for tell in self.after_pass:
            tell()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """The loader's own attributes: `dataset`, `sampler`, `batch_size`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def indices_of(self, batch: Any) -> list[Index] | None:
        """Return the positions of a batch's samples in the data set.

        For the last batches delivered and slices of them; None for others, and if the data set has
        no indices.
        """
        found = self.recent.find(batch)
        if found is None or found.indices is None:
            return None
        return list(found.indices)

    def where(self, batch: Any) -> tuple[int, int] | None:
        """Return the pass over the data and the number in it, both from 0, of a recent batch."""
        found = self.recent.find(batch)
        if found is None:
            return None
        return found.delivered.place

    def pass_over(
        self,
        batches: Collection[Place],
        *,
        causes: Mapping[Place, str] | None = None,
        indices: Mapping[Place, Collection[Index]] | None = None,
    ) -> None:
        """Do not deliver these batches again, each given as (pass, number in it).

        The position still counts them. `indices` says which samples are in a batch: one that is
        made of others is delivered. Without it a batch is known by its number, and only in the pass
        the loader is at: later ones may come in another order.
        """
        self._skipped.expect(batches, self.epoch, causes or {}, indices or {})

    def position(self) -> dict[str, Any]:
        """Return where the loop is, in plain values and tensors."""
        if self._goal is not None:
            return self._goal[0]
        state = None
        if self._begun is not None and keeps_position(self._loader):
            state = self._loader.state_dict()
        return {
            "epoch": self.epoch,
            "delivered": self.delivered,
            "begun": self._begun,
            "state": state,
        }

    def go_to(self, position: dict[str, Any], random_numbers: RngState | None) -> None:
        """Start the next iteration there, with these random numbers."""
        self.epoch = int(position["epoch"])
        self.delivered = int(position["delivered"])
        self._begun = None
        self._goal = None
        if position["begun"] is not None:
            self._goal = (position, random_numbers)

    def go_to_number(self, epoch: int, delivered: int) -> None:
        """Start the next iteration at this batch of this pass, in an order drawn anew."""
        begun = self._start_now() if delivered else None
        place = {"epoch": epoch, "delivered": delivered, "begun": begun, "state": None}
        self.go_to(place, None)

    def _from_start(self) -> IndexObserver:
        self.delivered = 0
        self._begun = self._start_now()
        return IndexObserver(self._loader)

    def _start_now(self) -> dict[str, Any]:
        return {
            "rng": _rng_as_facts(capture_rng()),
            "generators": [g.get_state() for g in self._generators()],
        }

    def _from_position(
        self, position: dict[str, Any], random_numbers: RngState | None
    ) -> IndexObserver:
        self._begun = position["begun"]
        self.delivered = int(position["delivered"])
        if position["state"] is not None and keeps_position(self._loader):
            self._loader.load_state_dict(position["state"])
            if getattr(self._loader, "num_workers", 0):
                self._say(
                    "the loader continues at its own position; random numbers inside its workers "
                    "start over"
                )
            iterator = IndexObserver(self._loader)
        else:
            iterator = self._fetch_again(position["begun"])
        # Last: making an iterator and fetching batches draws random numbers.
        if random_numbers is not None:
            restore_rng(random_numbers)
        return iterator

    def _fetch_again(self, begun: dict[str, Any]) -> IndexObserver:
        """Make the iterator from the same random numbers and drop what was delivered."""
        restore_rng(rng_from_facts(begun["rng"]["facts"], begun["rng"]["tensors"]))
        for generator, state in zip(self._generators(), begun["generators"], strict=False):
            generator.set_state(state)
        iterator = IndexObserver(self._loader)
        fetched = sum(1 for _ in zip(range(self.delivered), iterator, strict=False))
        self._say(self._fetched_again(fetched))
        return iterator

    def _fetched_again(self, fetched: int) -> str:
        said = (
            f"the loader has no position of its own: {fetched} batches were fetched again by "
            f"seed and dropped"
        )
        if fetched < self.delivered:
            missing = self.delivered - fetched
            said += f"; it ended {missing} batches early, so the data has changed since"
        if getattr(self._loader, "persistent_workers", False) and self.epoch:
            said += "; random numbers of its persistent workers start over"
        return said + "; torchdata's StatefulDataLoader continues at once"

    def _generators(self) -> list[torch.Generator]:
        """List the generators of their own that the loader and its samplers draw from."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        owners = [
            self._loader,
            getattr(self._loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ]
        found: dict[int, torch.Generator] = {}
        for owner in owners:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
        return list(found.values())


def _rng_as_facts(state: RngState) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    return {"facts": rng_to_facts(state, tensors, "start"), "tensors": tensors}

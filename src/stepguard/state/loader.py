"""Which samples a batch is made of, and a loader whose position can be saved and restored.

While somebody observes, two methods of torch's loader iterators are wrapped: there the indices that
the sampler yielded for each batch are known. Loaders, samplers, workers and random numbers stay as
they are, and only weak references to batches are kept: none stays in memory for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_from_facts, rng_to_facts
from stepguard.tensors.torch_private import NEXT_INDEX, LoaderIterator

MOST_PARTS = 32
"""Parts of one batch that are searched for tensors."""
NEXT = "__next__"
ATOMS = frozenset({str, int, float, bool, bytes, type(None)})

Index = int | str
Place = tuple[int, int]
"""A pass over the data and the number of a batch in it, both from 0."""

# --- Indices of delivered batches


_plain: dict[str, Any] = {}
"""The methods that are wrapped, as they were."""
_listening: weakref.WeakSet[RecentBatches] = weakref.WeakSet()
_yielded: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
"""Iterator of a DataLoader -> what its sampler yielded for each batch that is not delivered yet. An
iterator whose first batches were not observed is not in it.
"""


def observe_loaders(step: Callable[[], int]) -> RecentBatches:
    """Remember what every DataLoader of the process delivers, until `stop_observing`.

    `step` says which step a batch is delivered for.
    """
    recent = RecentBatches(step, observed=True)
    _observe(recent)
    return recent


def _observe(recent: RecentBatches) -> None:
    _listening.add(recent)
    for name, wrapper in ((NEXT, _deliver), (NEXT_INDEX, _fetch_index)):
        if name not in _plain:
            _plain[name] = getattr(LoaderIterator, name)
            setattr(LoaderIterator, name, wrapper)


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
    # Always 0 where no worker fetches ahead.
    number = getattr(iterator, "_send_idx", 0)
    if not number:
        _yielded[iterator] = {}
    waiting = _yielded.get(iterator)
    if waiting is not None:
        for other in list(waiting):
            if other < _last_number(iterator):
                del waiting[other]
        # a copy of a list: a sampler may fill the same one again
        waiting[number] = tuple(index) if isinstance(index, list) else index
    return index


def _deliver(iterator: Any) -> Any:
    batch = _plain[NEXT](iterator)
    raw = _yielded_for_last(iterator)
    dataset = getattr(iterator, "_dataset", None)
    for recent in list(_listening):
        for tell in recent.told:
            tell(iterator, raw, batch, recent.step())
        if recent.observed and raw is not None:
            # only a part of a data set is asked for its rows of the whole
            recent.add(batch, None, 0, raw, dataset if type(dataset) is Subset else None)
    return batch


def _last_number(iterator: Any) -> int:
    """The number of the last batch that workers have delivered."""
    return int(getattr(iterator, "_rcvd_idx", 1)) - 1


def _yielded_for_last(iterator: Any) -> Any:
    """What the sampler yielded for the last batch; None where not known."""
    if not isinstance(iterator, LoaderIterator) or not getattr(iterator, "_in_order", True):
        return None
    if isinstance(getattr(iterator, "_dataset", None), IterableDataset):
        return None
    return _yielded.get(iterator, {}).get(_last_number(iterator))


def as_indices(given: Any, dataset: Any = None) -> tuple[Index, ...] | None:
    """Return what a sampler yielded for one batch as plain values; None for anything else.

    Those of a part made by `Subset` or `random_split` are its rows of the whole. Waits for the
    device only if a sampler yields its tensors.
    """
    given = _as_python(given)
    several = given if isinstance(given, list | tuple | range) else (given,)
    found = tuple(_as_python(index) for index in several)
    for index in found:
        # A bool is an int for Python, and never an index.
        if not isinstance(index, int | str) or isinstance(index, bool):
            return None
    while type(dataset) is Subset:
        rows = dataset.indices
        if not all(isinstance(row, int) and -len(rows) <= row < len(rows) for row in found):
            return None
        found = tuple(_as_python(rows[index]) for index in found)
        dataset = dataset.dataset
    return found


def _as_python(value: Any) -> Any:
    """Turn tensors, arrays and numbers of numpy into numbers and lists."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return value


# --- Find a batch again among the last ones delivered, by the tensors it is made of


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
    def place(self) -> Place | None:
        """The pass and the number in it."""
        return None if self.epoch is None else (self.epoch, self.number)

    @property
    def indices(self) -> tuple[Index, ...] | None:
        return as_indices(self.raw, self.dataset)

    @property
    def tensors(self) -> list[Tensor]:
        """Its first tensors, as far as they are still in memory."""
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
        """`step` says which one a batch is delivered for. `observed`: the batches come from any
        loader of the process, perhaps ahead of their step.
        """
        self.step = step
        self.observed = observed
        # Batches. A step has rarely more micro-batches, and a fused one is read one step late
        self._batches: deque[Delivered] = deque(maxlen=256)
        self.told: list[Callable[[Any, Any, Any, int], None]] = []
        """Called for every batch with the iterator that delivers it, what its sampler yielded for
        it (None where not known), the batch, and the step it is for."""

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
        tensors = first_tensors(batch)
        asked = {id(tensor) for tensor in tensors}
        best = 0
        matching: list[Delivered] = []
        for each in self._batches:
            score = sum(id(tensor) in asked for tensor in each.tensors)
            if score > best:
                best = score
                matching = [each]
            elif score and score == best:
                matching.append(each)
        if best:
            if len(matching) == 1:
                return FoundBatch(matching[0])
            return None
        # A slice of a delivered tensor, as loops cut their batches into micro-batches.
        for tensor in tensors:
            for each in reversed(self._batches):
                for whole in each.tensors:
                    rows = _rows_of(tensor, whole)
                    if rows is not None:
                        return FoundBatch(each, rows, int(whole.shape[0]))
        return None

    def of_step(self, step: int) -> list[Delivered]:
        """List what was delivered for this step, in order; after a rewind, the newer ones."""
        found: list[Delivered] = []
        for each in reversed(self._batches):
            if each.step == step:
                found.append(each)
            elif found:
                break
        return found[::-1]


def _rows_of(part: Tensor, whole: Tensor) -> tuple[int, ...] | None:
    """Return which rows of `whole` the view `part` is made of; None if it is not such a view."""
    for tensor in (part, whole):
        if tensor.layout is not torch.strided or not tensor.dim() or tensor.is_nested:
            return None
    if part.shape[1:] != whole.shape[1:] or part.stride()[1:] != whole.stride()[1:]:
        return None
    # Python makes a new storage object on every call; _cdata is the address of the real one.
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata or not part.numel():
        return None
    row_size = whole.stride(0)
    offset = int(part.storage_offset()) - int(whole.storage_offset())
    if not row_size or offset % row_size or part.stride(0) % row_size:
        return None
    every = part.stride(0) // row_size
    rows = tuple(offset // row_size + row * every for row in range(part.shape[0]))
    if min(rows) < 0 or max(rows) >= whole.shape[0]:
        return None
    return rows


def first_tensors(batch: Any) -> list[Tensor]:
    """List the first tensors of a batch. Runs no code of the user's classes."""
    found: list[Tensor] = []
    waiting = deque([batch])
    searched = 0
    # Tensors of one batch: enough to find it again
    while waiting and len(found) < 4 and searched < MOST_PARTS:
        item = waiting.popleft()
        searched += 1
        if issubclass(type(item), Tensor):
            found.append(item)
        elif type(item) not in ATOMS:
            waiting.extend(parts_of(item))
    return found


def parts_of(item: Any, most: int = MOST_PARTS) -> list[Any]:
    """List direct parts of a container, past methods that its class may have overridden."""
    kind = type(item)
    if issubclass(kind, dict):
        return list(islice(dict.values(item), most))
    for sequence in (list, tuple):
        if issubclass(kind, sequence):
            few = list(islice(sequence.__iter__(item), most))
            # A list of names is long and holds no tensor.
            if few and type(few[0]) in ATOMS:
                return []
            return few
    if issubclass(kind, type) or kind.__module__ == "builtins":
        return []
    if is_dataclass(kind):
        return [object.__getattribute__(item, field.name) for field in fields(kind)]
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return []
    return list(islice(attributes.values(), most))


# --- The user's loader, with a position that can be saved and restored


class ResumableLoader:
    """Iterate over this instead of the loader. `between` is called before each batch."""

    def __init__(
        self,
        loader: Any,
        between: Callable[[], None],
        say: Callable[[str], None],
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        """`step` says which step a batch is delivered for."""
        self._loader = loader
        self._between = between
        self._say = say
        self.recent = RecentBatches(step)
        self._skipped: dict[Place, tuple[str, Collection[Index]]] = {}
        """Batches that are not delivered: why not, and the indices they must have."""
        self._known_order = 0
        """The pass whose order of batches is the one in which they were skipped."""
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
        _observe(self.recent)
        try:
            yield from self._batches()
        finally:
            stop_observing(self.recent)
        self._begun = None
        self.delivered = 0
        self.epoch += 1
        for call in self.after_pass:
            call()

    def _batches(self) -> Iterator[Any]:
        if self._goal is None:
            self.delivered = 0
            self._begun = self._start_now()
            iterator = iter(self._loader)
        else:
            iterator = self._from_position(*self._goal)
            self._goal = None
        dataset = getattr(self._loader, "dataset", None)
        stretch: list[Place] = []
        while True:
            self._between()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            place = (self.epoch, self.delivered)
            self.delivered += 1
            raw = _yielded_for_last(iterator)
            if place not in self._skipped:
                is_skipped = False
            else:
                _, expected = self._skipped[place]
                indices = as_indices(raw, dataset)
                if not expected or indices is None:
                    is_skipped = place[0] == self._known_order
                else:
                    is_skipped = set(expected) <= set(indices)
            if is_skipped:
                stretch.append(place)
                continue
            self._say_skipped(stretch)
            stretch = []
            self.recent.add(batch, *place, raw, dataset)
            yield batch
        self._say_skipped(stretch)

    def _say_skipped(self, stretch: list[Place]) -> None:
        """Say one line on a stretch of skipped batches that has ended."""
        if not stretch:
            return
        epoch, first = stretch[0]
        last = stretch[-1][1]
        which = f"batch {first}" if first == last else f"batches {first}-{last}"
        line = f"skipping {which} of pass {epoch}: dropped before"
        # A dict keeps the order and names each cause once.
        causes = dict.fromkeys(self._skipped[place][0] for place in stretch)
        causes.pop("", None)
        if causes:
            line += f" as {', '.join(causes)}"
        self._say(line)

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

    def where(self, batch: Any) -> Place | None:
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
        self._known_order = self.epoch
        self._skipped = {}
        for place in batches:
            self._skipped[place] = ((causes or {}).get(place, ""), (indices or {}).get(place, ()))

    def position(self) -> dict[str, Any]:
        """Return where the loop is, in plain values and tensors."""
        if self._goal is not None:
            return self._goal[0]
        state = None
        if self._begun is not None and self._keeps_position():
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

    def _keeps_position(self) -> bool:
        wanted = ("state_dict", "load_state_dict")
        return all(callable(getattr(self._loader, name, None)) for name in wanted)

    def _start_now(self) -> dict[str, Any]:
        tensors: dict[str, Tensor] = {}
        return {
            "rng": {"facts": rng_to_facts(capture_rng(), tensors, "start"), "tensors": tensors},
            "generators": [g.get_state() for g in self._generators()],
        }

    def _from_position(
        self, position: dict[str, Any], random_numbers: RngState | None
    ) -> Iterator[Any]:
        begun = self._begun = position["begun"]
        self.delivered = int(position["delivered"])
        workers = getattr(self._loader, "num_workers", 0)
        if position["state"] is not None and self._keeps_position():
            self._loader.load_state_dict(position["state"])
            if workers:
                self._say(
                    "the loader continues at its own position; random numbers inside its workers "
                    "start over"
                )
            iterator: Iterator[Any] = iter(self._loader)
        else:
            # Make the iterator from the same random numbers and drop what was delivered.
            restore_rng(rng_from_facts(begun["rng"]["facts"], begun["rng"]["tensors"]))
            for generator, state in zip(self._generators(), begun["generators"], strict=False):
                generator.set_state(state)
            iterator = iter(self._loader)
            fetched = sum(1 for _ in zip(range(self.delivered), iterator, strict=False))
            said = (
                "the loader has no position of its own; batches fetched again by seed and "
                f"dropped: {fetched}"
            )
            if fetched < self.delivered:
                missing = self.delivered - fetched
                said += (
                    f"; it ended early (batches missing: {missing}), so the data has changed since"
                )
            if getattr(self._loader, "persistent_workers", False) and self.epoch:
                said += "; random numbers of its persistent workers start over"
            self._say(said + "; torchdata's StatefulDataLoader continues at once")
        # Last: making an iterator and fetching batches draws random numbers.
        if random_numbers is not None:
            restore_rng(random_numbers)
        return iterator

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

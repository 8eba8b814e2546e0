"""Does every pass over the data come in another order, and does every worker draw other numbers?

Passes are told apart by the iterators of DataLoaders, their order by what the samplers yield. What
a worker process draws is seen by the worker itself: one that is forked while a guard observes notes
the states of its random generators before and after its first batch in memory that it shares with
the training process. States are only read.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, get_worker_info

from stepguard.diagnose.case import LoaderFacts
from stepguard.state.loader import as_indices, parts_of
from stepguard.tensors.names import wrap
from stepguard.tensors.torch_private import MapFetcher

# --- What a worker draws for its first batch.


SLOTS = 256
"""Workers whose notes are kept: those of the newest passes."""
SOURCES = ("random", "numpy.random", "torch", "a generator that the data set holds")
NOTE = struct.Struct("<qq8s8s8s8s8s8s8s8s")
"""Seed of the pass, number of the worker, and state of every source before and after."""
DEEPEST, MOST_OBJECTS = 4, 256
_notes: list[mmap.mmap] = []
"""Memory that is shared with the workers that are forked from now on."""
_undo = ExitStack()
_observers = 0
"""Guards that observe; only counted, because a reference would keep their models alive."""
_noted: list[int] = [0]
"""The process that has made its note."""


def observe_workers(undo: ExitStack) -> None:
    """Let workers that are forked from now on note what they draw."""
    if not _notes:
        _notes.append(mmap.mmap(-1, SLOTS * NOTE.size))
    global _observers
    if not _observers:
        wrap(_undo, MapFetcher, "fetch", _noting)
    _observers += 1
    undo.callback(_stop)


def _stop() -> None:
    global _observers
    _observers -= 1
    if not _observers:
        _undo.close()


def _noting(original: Any) -> Any:
    def fetch(self: Any, indices: Any) -> Any:
        info = get_worker_info()
        if info is None or _noted[0] == os.getpid():
            return original(self, indices)
        _noted[0] = os.getpid()
        before: list[bytes] = []
        with suppress(Exception):
            before = _states(info.dataset)
        made = original(self, indices)
        with suppress(Exception):
            seed = info.seed - info.id
            pairs = chain.from_iterable(zip(before, _states(info.dataset), strict=True))
            NOTE.pack_into(_notes[0], _slot(seed, info.id), seed, info.id + 1, *pairs)
        return made

    return fetch


def _slot(seed: int, worker: int) -> int:
    return (seed + worker) % SLOTS * NOTE.size


def _states(dataset: Any) -> list[bytes]:
    """A digest of the state of every source; of zeros where there is none."""
    found = [_digest(repr(random.getstate()).encode()), bytes(8)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, key, *rest = numpy.random.get_state()
        found[1] = _digest(repr(tuple(rest)).encode(), key.tobytes())
    found.append(_digest(torch.default_generator.get_state().numpy().tobytes()))
    own = [repr(state).encode() for state in _held(dataset, numpy)]
    return [*found, _digest(*own) if own else bytes(8)]


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=8).digest()


def _held(dataset: Any, numpy: Any) -> Iterator[Any]:
    """States of the generators in the attributes of the data set. Runs no code of its classes."""
    waiting = deque([(dataset, 0)])
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        item, depth = waiting.popleft()
        kind = type(item)
        if id(item) in seen or issubclass(kind, type | torch.Tensor):
            continue
        seen.add(id(item))
        if kind is torch.Generator:
            yield item.get_state().tolist()
        elif kind is random.Random:
            yield item.getstate()
        elif numpy is not None and kind is numpy.random.Generator:
            yield item.bit_generator.state
        elif numpy is not None and kind is numpy.random.RandomState:
            yield [part.tolist() if hasattr(part, "tolist") else part for part in item.get_state()]
        elif depth < DEEPEST:
            waiting.extend((part, depth + 1) for part in parts_of(item, MOST_OBJECTS))


# --- The first batches of the last passes.


FEW = 8
"""Batches of a pass that are remembered."""
KEPT = 8
"""Passes, those of a validation between two epochs among them."""
SHUFFLING = (RandomSampler, SubsetRandomSampler, DistributedSampler)


@dataclass(slots=True)
class LoaderPass:
    """One pass of a loader, as far as it has come."""

    dataset: int
    """Identity of the data set."""
    sampler: str
    """Class of the sampler, where it is one that shuffles."""
    indices: list[Any] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """For which step each of them was delivered."""
    workers: list[list[bytes]] = field(default_factory=list)
    """Notes of the workers, in their order."""
    persistent: bool = False

    @property
    def trains(self) -> bool:
        """Were its batches delivered for several steps? Those of a validation are not."""
        return bool(self.steps) and self.steps[-1] > self.steps[0]


class Passes:
    """Remembers what the loaders of the process deliver."""

    def __init__(self) -> None:
        self._passes: deque[LoaderPass] = deque(maxlen=KEPT)
        self._found = LoaderFacts()

    def delivered(self, iterator: Any, raw: Any, step: int) -> None:
        """A batch of this iterator, and what the sampler yielded for it."""
        number = iterator._num_yielded
        if number > FEW:
            return
        if number == 1:
            sampler = _shuffles(iterator._index_sampler)
            persistent = bool(getattr(iterator, "_persistent_workers", False))
            one = LoaderPass(id(iterator._dataset), sampler, persistent=persistent)
            self._passes.append(one)
        same = [one for one in self._passes if one.dataset == id(iterator._dataset)]
        if not same or len(same[-1].indices) != number - 1:
            return
        same[-1].indices.append(raw)
        same[-1].steps.append(step)
        if number == min(iterator._num_workers, FEW):
            same[-1].workers = list(_notes_of(iterator._base_seed, number))

    def facts(self) -> LoaderFacts:
        """What was found so far; what was found once stays."""
        trained: dict[int, LoaderPass] = {}
        for one in self._passes:
            if not one.trains:
                continue
            before = trained.get(one.dataset)
            self._judge_workers(one)
            # a run that went back to an earlier step is given the same data again
            if before is not None and one.steps[0] > before.steps[-1]:
                self._judge_order(before, one)
            trained[one.dataset] = one
        return self._found

    def _judge_workers(self, one: LoaderPass) -> None:
        if len(one.workers) < 2 or self._found.twins:
            return
        for source, *drawn in zip(SOURCES, *map(_pairs, one.workers), strict=False):
            before, after = drawn[0]
            # one that is seeded by the index of an example ends in another state in each worker
            if before != after and len(set(drawn)) == 1:
                self._found.twins, self._found.workers = source, len(drawn)

    def _judge_order(self, before: LoaderPass, one: LoaderPass) -> None:
        count = min(len(before.indices), len(one.indices))
        mine, theirs = (_flat(pass_.indices[:count]) for pass_ in (before, one))
        # Two shuffled orders begin with the same eight indices once in 40 000 passes of the
        # smallest data set that has them, and practically never in one that is trained on
        if not mine or len(set(mine)) < 8:
            return
        if mine == theirs and one.sampler and not self._found.sampler:
            self._found.sampler, self._found.batches = one.sampler, count
        elif mine != theirs and before.workers and one.workers and not one.persistent:
            pairs = zip(SOURCES, _pairs(before.workers[0]), _pairs(one.workers[0]), strict=False)
            for source, (start, end), again in pairs:
                if start != end and (start, end) == again and not self._found.repeats:
                    self._found.repeats = source


def _notes_of(seed: int, count: int) -> Iterator[list[bytes]]:
    """What each worker of a pass has noted; nothing where one of them has not."""
    for worker in range(count if _notes else 0):
        noted, number, *states = NOTE.unpack_from(_notes[0], _slot(seed, worker))
        if (noted, number) != (seed, worker + 1):
            return
        yield states


def _pairs(states: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(states[::2], states[1::2], strict=True)


def _flat(raws: list[Any]) -> list[Any]:
    found = [as_indices(raw) for raw in raws]
    return [] if None in found else [index for some in found for index in some or ()]


def _shuffles(sampler: Any) -> str:
    """Name of the sampler at the bottom, if it is one that shuffles."""
    for _ in range(DEEPEST):
        if issubclass(type(sampler), SHUFFLING):
            return type(sampler).__name__ if getattr(sampler, "shuffle", True) else ""
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            break
        sampler = inner
    return ""

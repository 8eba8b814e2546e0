"""The user's loader, with a position that can be saved and restored.

A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) keeps its own
position. Any other is brought back by seed and skip: its iterator is made again from the random
numbers it was made with, and the batches that were already delivered are fetched again and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from stepguard.state.delivered_batches import RecentBatches
from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_from_facts, rng_to_facts
from stepguard.state.sample_indices import Index, IndexObserver, keeps_position
from stepguard.state.skipped_batches import Place, SkippedBatches


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

"""The user's loader with a position that can be saved and gone back to.

A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) keeps its own
position. Any other is brought back by seed and skip: its iterator is made again from the random
numbers it was made with, and the batches that were already delivered are fetched again and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from stepguard.state.delivered_batches import Delivered, Found, Recent
from stepguard.state.rng import RngState, capture_rng, restore_rng, rng_apart, rng_together
from stepguard.state.sample_indices import Index, Overheard
from stepguard.state.skipped_batches import Passing, Place


class Feed:
    """Iterate over this in place of the loader. `between` is called before each batch is fetched."""

    def __init__(
        self,
        loader: Any,
        between: Callable[[], None],
        say: Callable[[str], None],
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        """`step` tells which step a batch is delivered for."""
        self._loader, self._between, self._say, self._step = loader, between, say, step
        self._recent, self._passing = Recent(), Passing(say)
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
        goal, self._goal = self._goal, None
        iterator = self._from_start() if goal is None else self._go(*goal)
        while True:
            self._between()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            number = self.delivered
            self.delivered += 1
            if self._passing.passes_over((self.epoch, number), iterator):
                continue
            self._recent.add(batch, self.epoch, number, self._step(), iterator)
            yield batch
        self._passing.tell()
        self._begun, self.delivered = None, 0
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
        """Where the samples of a batch are in the data set, for the last batches delivered and
        slices of them.

        None where the loader does not know: a data set without indices, a batch that is not (made
        of) one of these.
        """
        found = self._recent.find(batch)
        indices = found.indices if found is not None else None
        return list(indices) if indices is not None else None

    def where(self, batch: Any) -> tuple[int, int] | None:
        """The pass over the data and the number in it, both from 0, of one of the last batches."""
        found = self._recent.find(batch)
        return (found.delivered.epoch, found.delivered.number) if found is not None else None

    def find(self, batch: Any) -> Found | None:
        """The batch among the last ones delivered, or the one it is a slice of."""
        return self._recent.find(batch)

    def of_step(self, step: int) -> list[Delivered]:
        """The batches that were delivered for a step, in order, as far back as is remembered."""
        return self._recent.of_step(step)

    def pass_over(
        self,
        batches: Collection[Place],
        *,
        causes: Mapping[Place, str] | None = None,
        indices: Mapping[Place, Collection[Index]] | None = None,
    ) -> None:
        """Do not deliver these batches again, each given as (pass, number in it). The position
        still counts them.

        `indices` says which samples are in a batch: one that is made of others is delivered.
        Without it a batch is known by its number, and only in the pass the loader is at: later ones
        may come in another order.
        """
        self._passing.expect(batches, self.epoch, causes or {}, indices or {})

    def position(self) -> dict[str, Any]:
        """Where the loop is, in plain values and tensors."""
        if self._goal is not None:
            return self._goal[0]
        state = (
            self._loader.state_dict() if self._begun is not None and self._keeps_itself() else None
        )
        return {
            "epoch": self.epoch,
            "delivered": self.delivered,
            "begun": self._begun,
            "state": state,
        }

    def go_to(self, position: dict[str, Any], random_numbers: RngState | None) -> None:
        """The next iteration starts there, with these random numbers."""
        self.epoch, self.delivered = int(position["epoch"]), int(position["delivered"])
        self._begun = None
        self._goal = (position, random_numbers) if position["begun"] is not None else None

    def _keeps_itself(self) -> bool:
        return all(
            callable(getattr(self._loader, name, None))
            for name in ("state_dict", "load_state_dict")
        )

    def _from_start(self) -> Overheard:
        self.delivered = 0
        self._begun = {
            "rng": _plain(capture_rng()),
            "generators": [g.get_state() for g in self._generators()],
        }
        return Overheard(self._loader)

    def _go(self, position: dict[str, Any], random_numbers: RngState | None) -> Overheard:
        self._begun, self.delivered = position["begun"], int(position["delivered"])
        if position["state"] is not None and self._keeps_itself():
            self._loader.load_state_dict(position["state"])
            if getattr(self._loader, "num_workers", 0):
                self._say(
                    "the loader continues at its own position; random numbers inside its workers "
                    "begin anew"
                )
            iterator = Overheard(self._loader)
        else:
            iterator = self._skip(position["begun"])
        if random_numbers is not None:
            restore_rng(random_numbers)
        return iterator

    def _skip(self, begun: dict[str, Any]) -> Overheard:
        restore_rng(_together(begun["rng"]))
        for generator, state in zip(self._generators(), begun["generators"], strict=False):
            generator.set_state(state)
        iterator = Overheard(self._loader)
        fetched = sum(1 for _ in zip(range(self.delivered), iterator, strict=False))
        self._say(self._story(fetched))
        return iterator

    def _story(self, fetched: int) -> str:
        said = (
            f"the loader has no position of its own: {fetched} batches were fetched again by "
            f"seed and dropped"
        )
        if fetched < self.delivered:
            said += (
                f"; it ended {self.delivered - fetched} batches early, so the data has changed "
                f"since"
            )
        if getattr(self._loader, "persistent_workers", False) and self.epoch:
            said += "; random numbers of its persistent workers begin anew"
        return said + "; torchdata's StatefulDataLoader continues at once"

    def _generators(self) -> list[torch.Generator]:
        """Those the loader and its samplers draw from, where they have their own."""
        samplers = (getattr(self._loader, name, None) for name in ("sampler", "batch_sampler"))
        owners = [
            self._loader,
            *samplers,
            getattr(getattr(self._loader, "batch_sampler", None), "sampler", None),
        ]
        found = {
            id(g): g
            for g in (getattr(o, "generator", None) for o in owners)
            if isinstance(g, torch.Generator)
        }
        return list(found.values())


def _plain(state: RngState) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    return {"facts": rng_apart(state, tensors, "start"), "tensors": tensors}


def _together(plain: dict[str, Any]) -> RngState:
    return rng_together(plain["facts"], plain["tensors"])

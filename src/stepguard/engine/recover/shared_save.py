"""One checkpoint that every rank writes its part of: sealed once all have, or not at all.

The ranks begin together, in the main thread. From then on each writes for itself, in the background
where nothing waits for it, and leaves word in the key-value store of the process group. The first
rank waits for all words, seals, and leaves the last word. No collective is involved, and waiting
has an end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard._errors import StoreError
from stepguard.checkpoints import Health, Store
from stepguard.engine.context import Context
from stepguard.sentinel.rank_agreement import ASKED, PATIENCE
from stepguard.state.run_state import SavedState
from stepguard.tensors.torch_private import default_store

WRITTEN = "written "
SEALED = "sealed "
NOT_SEALED = "not sealed: "
SHORTEST, LONGEST = 0.002, 0.25
"""Seconds between two looks into the store."""
LAST_WORD = "last"


BYTES_A_SECOND = 50e6
"""What a slow disk writes and reads back."""


def writing_time(state: SavedState) -> float:
    """Seconds after which a rank that writes such a state has failed, however slow its disk is."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
    return ASKED + size / BYTES_A_SECOND


@dataclass(frozen=True, slots=True)
class SharedSave:
    """What one rank knows of a save that all have begun."""

    context: Context
    store: Store
    folder: Path
    """Temporary; every rank writes into it."""
    step: int
    state: SavedState
    health: Health
    allowed: frozenset[str]
    """Tensors of this rank that may be non-finite."""
    on_sealed: Callable[[int, Path, Health], None]
    """Told of the checkpoint once all ranks have written it."""

    def run(self) -> Path:
        """Write this rank's part, and return when all have; StoreError on every rank otherwise."""
        own = self._written()
        self._leave_word(str(self.context.agreement.rank), own)
        if self.context.agreement.rank == 0:
            self._leave_word(LAST_WORD, self._sealed())
        said = self._word(LAST_WORD, self._deadline(2.0), "the first rank has not sealed it")
        if not said.startswith(SEALED):
            raise StoreError(said.removeprefix(NOT_SEALED))
        path = Path(said.removeprefix(SEALED))
        self.on_sealed(self.step, path, self.health)
        return path

    def _written(self) -> str:
        agreement = self.context.agreement
        tensors = self.state.tensors
        if agreement.rank:
            # what every rank holds alike is written by the first one
            apart = (f"rng/{agreement.rank}/", f"loader/{agreement.rank}/", "rank/")
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if name in self.state.parts or name.startswith(apart)
            }
        try:
            digest = self.store.write_part(
                self.folder, agreement.rank, tensors, self.state.parts, self.allowed
            )
        except Exception as fault:
            return f"{NOT_SEALED}rank {agreement.world_rank}: {fault}"
        return f"{WRITTEN}{digest}"

    def _sealed(self) -> str:
        """As the first rank: wait for all, and seal what they have written."""
        try:
            digests = self._digests()
            path = self.store.finish(self.folder, self.step, self.state.facts, self.health, digests)
        except Exception as fault:
            self.store.drop(self.folder)
            return f"{NOT_SEALED}{fault}"
        return f"{SEALED}{path}"

    def _digests(self) -> list[str]:
        """What all ranks have written; StoreError where one has not, once all are done."""
        until = self._deadline(1.0)
        words = []
        # all of them first: one that is still writing would write into a folder that is gone
        for rank, member in enumerate(self.context.agreement.members):
            words.append(self._word(str(rank), until, f"rank {member} has not written its part"))
        for said in words:
            if not said.startswith(WRITTEN):
                raise StoreError(said.removeprefix(NOT_SEALED))
        return [said.removeprefix(WRITTEN) for said in words]

    # --- words in the store of the process group

    def _key(self, name: str) -> str:
        # the name of the folder has a process and a number in it
        return f"stepguard/save/{self.folder.name}/{name}"

    def _leave_word(self, name: str, word: str) -> None:
        default_store().set(self._key(name), word)

    def _word(self, name: str, until: float, otherwise: str) -> str:
        """Wait for a word; not by `store.wait`, which keeps the main thread from the store."""
        store = default_store()
        key = self._key(name)
        pause = SHORTEST
        while not store.check([key]):
            if time.monotonic() >= until:
                return f"{NOT_SEALED}{otherwise} in time."
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST)
        word: str = store.get(key).decode()
        return word

    def _deadline(self, times: float) -> float:
        most = PATIENCE * self.context.config.agree_timeout
        return time.monotonic() + times * min(most, writing_time(self.state))


def begin_together(context: Context, store: Store, step: int) -> tuple[Path | None, str]:
    """Have the first rank make the folder; returns it, or why there is none. All ranks call."""

    def begin() -> dict[str, Any]:
        if context.agreement.rank:
            return {}
        try:
            return {"folder": str(store.begin(step)), "why": ""}
        except StoreError as fault:
            return {"folder": "", "why": str(fault)}

    told: Mapping[str, Any] = context.agreement.together(begin, "writing a checkpoint")[0]
    if told["why"]:
        return None, str(told["why"])
    return Path(told["folder"]), ""


Job = Callable[[], Path | None]

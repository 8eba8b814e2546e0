"""Save and restore the state of several ranks: what they share once, and what each has of its own.

A checkpoint holds the state of the first rank. Experts, stages and ensembles hold other tensors:
those stand beside it as `rank/1/model/NAME`, and `facts["ranks"]` says what each rank has and
lacks. Then, and where ranks hold shards, every rank writes its own part, and the first one seals it
once all have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepguard._errors import StoreError
from stepguard.checkpoints import Health, Store
from stepguard.ranks.agreement import ASKED, Agreement
from stepguard.ranks.copies import fact_fingerprint, fingerprints
from stepguard.report.phrases import count
from stepguard.state.run_state import SavedState

OWN = ("rng", "loader")
"""Facts that every rank has its own of in any case, and the tensors that go with them."""
NOT_COMPARED = (*OWN, "guard", "ranks", "nonfinite_ok")
WRITTEN = "written "
SEALED = "sealed "
NOT_SEALED = "not sealed: "
BYTES_A_SECOND = 50e6
"""What a slow disk writes and reads back."""


def writing_time(state: SavedState) -> float:
    """Seconds after which a rank that writes such a state has failed, however slow its disk is."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
    return ASKED + size / BYTES_A_SECOND


# --- One checkpoint that every rank writes its part of: sealed once all have, or not at all.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSave:
    """What one rank knows of a save that all have begun."""

    agreement: Agreement
    store: Store
    folder: Path
    """Temporary; every rank writes into it."""
    step: int
    state: SavedState
    health: Health
    seconds: float
    """How long the slowest rank may take."""

    def run(self) -> Path:
        """Write this rank's part, and return when all have; StoreError on every rank otherwise."""
        agreement = self.agreement
        agreement.tell(self._about(str(agreement.rank)), self._written())
        if agreement.rank == 0:
            agreement.tell(self._about("last"), self._sealed())
        said = agreement.word_of(self._about("last"), 2.0 * self.seconds)
        if not said.startswith(SEALED):
            why = said or "the first rank has not sealed it in time."
            raise StoreError(why.removeprefix(NOT_SEALED))
        return Path(said.removeprefix(SEALED))

    def _about(self, name: str) -> str:
        # the name of the folder has a process and a number in it
        return f"save/{self.folder.name}/{name}"

    def _written(self) -> str:
        rank = self.agreement.rank
        tensors = self.state.tensors
        if rank:
            # what every rank holds alike is written by the first one
            own = (*(f"{kind}/{rank}/" for kind in OWN), "rank/")
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if name in self.state.parts or name.startswith(own)
            }
        allowed = frozenset(self.state.facts["nonfinite_ok"])
        try:
            digest = self.store.write_part(self.folder, rank, tensors, self.state.parts, allowed)
        except Exception as fault:
            return f"{NOT_SEALED}rank {self.agreement.world_rank}: {fault}"
        return f"{WRITTEN}{digest}"

    def _sealed(self) -> str:
        """On rank 0, wait for all ranks and seal what they have written."""
        try:
            words = []
            # all of them first: one that is still writing would write into a folder that is gone
            for rank, member in enumerate(self.agreement.members):
                said = self.agreement.word_of(self._about(str(rank)), self.seconds)
                words.append(said or f"rank {member} has not written its part in time.")
            for said in words:
                if not said.startswith(WRITTEN):
                    raise StoreError(said.removeprefix(NOT_SEALED))
            digests = [said.removeprefix(WRITTEN) for said in words]
            path = self.store.finish(self.folder, self.step, self.state.facts, self.health, digests)
        except Exception as fault:
            self.store.drop(self.folder)
            return f"{NOT_SEALED}{fault}"
        return f"{SEALED}{path}"


# --- What a rank has of its own.


class RankParts:
    """Takes what is a rank's own out of its state, and puts it beside the state of the first."""

    def __init__(self, agreement: Agreement, model: nn.Module, note: Callable[[str], None]) -> None:
        self._agreement = agreement
        self._model = model
        self._note = note
        self._noted = False

    def own(self, state: SavedState) -> dict[str, Any]:
        """Random numbers and place in the data, and a digest of all that should be equal."""
        if self._agreement.size == 1:
            return {}
        prefixes = tuple(f"{kind}/" for kind in OWN)
        tensors = {name: t for name, t in state.tensors.items() if name.startswith(prefixes)}
        rank = str(self._agreement.rank)
        facts = {kind: state.facts[kind][rank] for kind in OWN if kind in state.facts}
        summary = fact_fingerprint([self._prints(state), _compared_facts(state)])
        return {"facts": facts, "tensors": tensors, "summary": summary}

    def keep_apart(self, state: SavedState) -> dict[str, Any]:
        """Rename what this rank holds otherwise than the first one; what each has and lacks.

        Called by all ranks, once their summaries have been seen to differ.
        """
        own = {"prints": self._prints(state), "facts": _compared_facts(state)}
        first, *others = self._agreement.together(lambda: own, "the weights of a checkpoint")
        ranks: dict[str, Any] = {}
        named = ""
        for rank, told in enumerate(others, 1):
            prints = told["prints"]
            has = sorted(name for name in prints if first["prints"].get(name) != prints[name])
            lacks = sorted(first["prints"].keys() - prints.keys())
            facts = {k: v for k, v in told["facts"].items() if first["facts"].get(k) != v}
            ranks[str(rank)] = {"has": has, "lacks": lacks, "facts": facts}
            for name in [*has, *lacks][:1]:
                named = named or f"{name} on rank {rank}"
        mine = ranks.get(str(self._agreement.rank), {"has": ()})
        for name in mine["has"]:
            state.tensors[f"rank/{self._agreement.rank}/{name}"] = state.tensors.pop(name)
        if not self._noted:
            self._noted = True
            self._note(
                f"the ranks hold different values, first {named or 'facts'}: the "
                "checkpoint keeps the values of each rank and can be restored with this "
                "number of ranks only"
            )
        return ranks

    def buffers(self) -> set[str]:
        """Buffers of DistributedDataParallel, by their names in a state."""
        if not isinstance(self._model, DistributedDataParallel):
            return set()
        names = {name for name, _ in self._model.module.named_buffers()}
        return {f"model/{name}" for name in names} | {f"model/module.{name}" for name in names}

    def _prints(self, state: SavedState) -> dict[str, str]:
        # of shards every rank has its own; DDP sends its buffers from the first rank to all
        own = set(state.parts)
        if getattr(self._model, "broadcast_buffers", False):
            own |= self.buffers()
        prefixes = ("rank/", *(f"{kind}/" for kind in OWN))
        return fingerprints(
            {
                name: tensor
                for name, tensor in state.tensors.items()
                if name not in own and not name.startswith(prefixes)
            }
        )


def _compared_facts(state: SavedState) -> dict[str, Any]:
    return {kind: facts for kind, facts in state.facts.items() if kind not in NOT_COMPARED}


def state_of_rank(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], rank: int) -> SavedState:
    """The state as this rank had it when it was saved."""
    shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("rank/")}
    own = facts.get("ranks", {}).get(str(rank))
    if own is None:
        return SavedState(shared, dict(facts))
    for name in own["lacks"]:
        shared.pop(name, None)
    for name in own["has"]:
        shared[name] = tensors[f"rank/{rank}/{name}"]
    return SavedState(shared, {**facts, **own["facts"]})


def missing_in(facts: Mapping[str, Any]) -> str:
    """What a checkpoint that one rank wrote lacks of the others, in words; empty if nothing."""
    alone = facts.get("saved_alone")
    if not alone:
        return ""
    without = [
        str(rank) for place, rank in enumerate(alone["ranks"]) if str(place) not in facts["rng"]
    ]
    ranks = "rank" if len(without) == 1 else "ranks"
    return f"{alone['own']} of {ranks} {', '.join(without)}" if without else ""


def refuse_other_size(facts: Mapping[str, Any], size: int) -> None:
    """Refuse a checkpoint whose weights or optimizer state belong to another number of ranks."""
    ranks = facts.get("ranks", {})
    if not ranks or len(ranks) + 1 == size:
        return
    trained = _trained(facts["groups"])
    held: set[str] = set()
    for own in ranks.values():
        trained |= _trained(own["facts"].get("groups", ()))
        held.update(own["has"])
    for name in sorted(held):
        kind, _, path = name.partition("/")
        # a slot of an optimizer that is spread over the ranks, or a trained weight
        if kind.startswith("optimizer") or path in trained or name.partition(":")[2] in trained:
            raise StoreError(
                f"the checkpoint holds different values for each of {len(ranks) + 1} ranks "
                f"(first {name}) and this run has {size}: restore it with {len(ranks) + 1}."
            )


def _trained(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group["params"]}


# --- The place of every rank in the data, also with another number of ranks.


def place_in_data(
    stored: Mapping[int, Mapping[str, Any]], size: int, *, same_ranks: bool
) -> tuple[tuple[int, int] | None, str]:
    """Pass and batch where a rank without a stored place goes on, and what becomes of the data.

    `same_ranks`: there were as many, and one of them saved alone. Every rank reads the same
    checkpoint, so all come to the same answer without an exchange.
    """
    places = {(int(place["epoch"]), int(place["delivered"])) for place in stored.values()}
    shared = places.pop() if len(places) == 1 else None
    if len(stored) == size:
        return shared, ""
    return shared, _story(stored.keys(), size, shared, same_ranks=same_ranks)


def _story(
    stored: Collection[int], size: int, shared: tuple[int, int] | None, *, same_ranks: bool
) -> str:
    if not stored:
        return "the checkpoint holds no position in the data: the loader starts at the beginning"
    held = count(len(stored), "rank")
    said = f"the checkpoint holds positions in the data for {held}; this run has {size}"
    absent = [str(rank) for rank in range(size) if rank not in stored]
    without = f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(absent)}" if absent else ""
    if without and shared is None:
        said += f": on {without} the data STARTS AGAIN, because the positions differ"
    elif without and shared is not None:
        place = f"batch {shared[1]} of pass {shared[0]}, as on the others"
        said += f": on {without} the data continues at {place}, with different random numbers"
    if same_ranks:
        return said
    share = "each rank now gets a different share of the data"
    return f"{said}; {share}: until this pass ends some samples come twice and some not at all"


def first_reason(reasons: Sequence[str]) -> str:
    """What speaks against it on the first rank where something does; named unless it is on all."""
    for rank, reason in enumerate(reasons):
        if reason:
            return reason if all(reasons) else f"rank {rank}: {reason}"
    return ""

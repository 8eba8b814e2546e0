"""Weights that are not the same on every rank: experts, pipeline stages, ensembles.

A checkpoint holds the state of rank 0. Where another rank's differs, that rank's own tensors stand
beside it as `rank/1/model/NAME`, and `facts["ranks"]` says what each rank has and lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stepguard._errors import StoreError
from stepguard.checkpoints import tensor_digest
from stepguard.engine.context import Context
from stepguard.state.fingerprint import fact_fingerprint, tensor_fingerprints
from stepguard.state.run_state import SavedState

APART = ("rng", "loader")
"""Facts that every rank has its own of in any case, and the tensors that go with them."""
NOT_COMPARED = (*APART, "guard", "ranks", "nonfinite_ok")
MOST = 4 * 2**30
"""Bytes of other ranks' weights that pass through rank 0's memory at most."""
WAY_OUT = "save each rank's own weights with torch.save, or all with torch.distributed.checkpoint"

WHAT = "the weights of a checkpoint"
"""What ranks meet for, as a message about a missing one says."""


class RankWeights:
    """Compares the states of the ranks before one is written, and collects what differs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told = False

    def summary(self, state: SavedState | None) -> str:
        """One digest of all that should be equal on the ranks; empty in a run of one process."""
        if state is None or self._context.agreement.size == 1:
            return ""
        return fact_fingerprint(self._prints(state))

    def collect(self, state: SavedState) -> tuple[dict[str, Any], str]:
        """Return what each rank has of its own, by rank; or why it cannot be written.

        Called by all ranks, once their summaries have been seen to differ.
        """
        agreement = self._context.agreement
        prints = [
            told["prints"] for told in agreement.together(lambda: self._told_prints(state), WHAT)
        ]
        first = _first_difference(prints)
        mine = _own_part(state, prints[0], prints[agreement.rank])
        size = sum(_bytes(tensor) for tensor in mine["tensors"].values())
        sizes = [told["size"] for told in agreement.together(lambda: {"size": size}, WHAT)]
        if sum(sizes) > MOST:
            amount = f"{sum(sizes) / 2**30:.1f} GiB of them"
            return {}, f"the ranks hold different weights ({first}), {amount}: {WAY_OUT}"
        parts = agreement.together(lambda: {"part": _portable(mine)}, WHAT)
        self._say_once(first)
        return {str(rank): told["part"] for rank, told in enumerate(parts) if rank}, ""

    def keep_apart(self, state: SavedState) -> dict[str, Any]:
        """Name what this rank holds otherwise than the first one, in a state that all ranks write.

        Those tensors stay on their rank; returned is what each rank has and lacks, by rank.
        """
        agreement = self._context.agreement
        prints = [
            told["prints"] for told in agreement.together(lambda: self._told_prints(state), WHAT)
        ]
        mine = _own_part(state, prints[0], prints[agreement.rank])
        for name in mine["tensors"]:
            state.tensors[f"rank/{agreement.rank}/{name}"] = state.tensors.pop(name)
        own = {"lacks": mine["lacks"], "facts": mine["facts"], "has": sorted(mine["tensors"])}
        told = agreement.together(lambda: {"own": own}, WHAT)
        self._say_once(_first_difference(prints))
        return {str(rank): facts["own"] for rank, facts in enumerate(told) if rank}

    def differing(
        self, state: SavedState, digests: Mapping[str, str], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What this rank holds otherwise than a checkpoint with these digests and facts."""
        compared = self._compared(state)
        own = {name: tensor_digest(tensor) for name, tensor in compared.items()}
        theirs = self._broadcast_buffers()
        first = {n: d for n, d in digests.items() if _is_common(n) and n not in theirs}
        for kind in state.facts.keys() - set(NOT_COMPARED):
            own[f"facts:{kind}"] = fact_fingerprint(state.facts[kind])
            first[f"facts:{kind}"] = fact_fingerprint(facts.get(kind))
        mine = _own_part(state, first, own)
        if mine["tensors"] or mine["facts"] or mine["lacks"]:
            different = sorted([*mine["tensors"], *mine["lacks"]]) or sorted(mine["facts"])
            self._say_once(f"{different[0]} on rank {self._context.agreement.rank}")
        return mine

    def _told_prints(self, state: SavedState) -> dict[str, Any]:
        return {"prints": self._prints(state)}

    def _prints(self, state: SavedState) -> dict[str, str]:
        found = tensor_fingerprints(self._compared(state))
        for kind, facts in state.facts.items():
            if kind not in NOT_COMPARED:
                found[f"facts:{kind}"] = fact_fingerprint(facts)
        return found

    def _compared(self, state: SavedState) -> dict[str, Tensor]:
        theirs = self._broadcast_buffers()
        return {
            name: tensor
            for name, tensor in state.tensors.items()
            if _is_common(name) and name not in theirs and name not in state.parts
        }

    def _broadcast_buffers(self) -> set[str]:
        """Buffers that DDP sends from rank 0 to all before each forward pass: not a rank's own."""
        model = self._context.model
        if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers:
            return set()
        if not self._context.agreement.follows_first_rank:
            return set()
        names = {name for name, _ in model.module.named_buffers()}
        return {f"model/{name}" for name in names} | {f"model/module.{name}" for name in names}

    def _say_once(self, first: str) -> None:
        if not self._told:
            self._told = True
            self._context.outputs.note(
                "checkpoint",
                f"the ranks hold different values, first {first}: the checkpoint holds every "
                "rank's own, and is restored with this number of ranks",
            )


def add_parts(state: SavedState, parts: Mapping[str, Any], *, tensors: bool = True) -> None:
    """Put the parts of the other ranks beside the state of rank 0.

    `tensors`: theirs as well; not where every rank writes its own.
    """
    if not parts:
        return
    ranks: dict[str, Any] = {}
    for rank, part in parts.items():
        names = part.get("has", [])
        if tensors:
            names = sorted(part["tensors"])
            for name, tensor in part["tensors"].items():
                state.tensors[f"rank/{rank}/{name}"] = tensor
        ranks[rank] = {"lacks": part["lacks"], "facts": part["facts"], "has": names}
    state.facts["ranks"] = ranks


def state_of_rank(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], rank: int) -> SavedState:
    """The state as this rank had it when it was saved."""
    shared = {name: tensor for name, tensor in tensors.items() if not _of_rank(name)}
    own = facts.get("ranks", {}).get(str(rank))
    if own is None:
        return SavedState(shared, dict(facts))
    for name in own["lacks"]:
        shared.pop(name, None)
    prefix = f"rank/{rank}/"
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            shared[name.removeprefix(prefix)] = tensor
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


def refuse_other_size(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], size: int) -> None:
    """Refuse a checkpoint whose weights or optimizer state belong to another number of ranks."""
    ranks = facts.get("ranks", {})
    if not ranks or len(ranks) + 1 == size:
        return
    trained = _trained(facts["groups"])
    for own in ranks.values():
        trained |= _trained(own["facts"].get("groups", ()))
    for bare in _held_apart(tensors, ranks):
        if _of_training(bare, trained):
            raise StoreError(
                f"the checkpoint holds other values for each of {len(ranks) + 1} ranks "
                f"(first {bare}) and this run has {size}: restore it with {len(ranks) + 1}."
            )


def _of_training(name: str, trained: set[str]) -> bool:
    """Is it a trained weight, or a slot of an optimizer that is spread over the ranks?"""
    if name.startswith("optimizer"):
        return True
    return name.partition("/")[2] in trained or name.partition(":")[2] in trained


def _trained(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group["params"]}


def _held_apart(tensors: Mapping[str, Tensor], ranks: Mapping[str, Any]) -> list[str]:
    """Names of what ranks hold of their own."""
    # by the facts, which all ranks have alike: of a state of shards a rank reads its own part only
    named = {name for own in ranks.values() for name in own.get("has", ())}
    if not named:
        named = {name.split("/", 2)[2] for name in filter(_of_rank, tensors)}
    return sorted(named)


def _own_part(
    state: SavedState, first: Mapping[str, str], own: Mapping[str, str]
) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for name, seen in own.items():
        if first.get(name) == seen:
            continue
        if name in state.tensors:
            tensors[name] = state.tensors[name]
        else:
            kind = name.removeprefix("facts:")
            facts[kind] = state.facts[kind]
    return {"tensors": tensors, "facts": facts, "lacks": sorted(first.keys() - own.keys())}


def _portable(part: dict[str, Any]) -> dict[str, Any]:
    # a clone: pickling a view would send the whole storage below it
    tensors = {name: t.detach().cpu().clone() for name, t in part["tensors"].items()}
    return {**part, "tensors": tensors}


def _first_difference(prints: list[dict[str, str]]) -> str:
    """Name what differs first, tensors before facts, and the first rank where it does."""
    for facts in (False, True):
        for rank, own in enumerate(prints):
            for name in sorted(own.keys() | prints[0].keys()):
                if name.startswith("facts:") is facts and own.get(name) != prints[0].get(name):
                    return f"{name} on rank {rank}"
    return "nothing"


def _is_common(name: str) -> bool:
    """Is it something that ranks may hold alike?"""
    return not _of_rank(name) and not name.startswith(tuple(f"{kind}/" for kind in APART))


def _of_rank(name: str) -> bool:
    return name.startswith("rank/")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""Weights that are not the same on every rank: experts, pipeline stages, ensembles.

A checkpoint holds the state of rank 0. Where another rank's differs, that rank's own tensors stand
beside it as `rank/1/model/NAME`, and `facts["ranks"]` says what each rank has and lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stepguard._errors import StoreError
from stepguard.checkpoints import tensor_digest
from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.sentinel.rank_agreement import RankFault
from stepguard.state.batch import tree_from_json
from stepguard.state.loader import ResumableLoader
from stepguard.state.rng import RngState
from stepguard.state.run_state import SavedState
from stepguard.state.sharded import (
    checksums,
    combined,
    fact_fingerprint,
    read_checksums,
    tensor_fingerprints,
)
from stepguard.tensors.names import parameter_names, shard_of
from stepguard.tensors.values import dense_values, is_finite, local_part

# --- Heal a damaged rank from a healthy one that holds the same weights and optimizer slots.


HEALING = "healing from a peer"
SLOTS_APART = ("ZeroRedundancyOptimizer",)
"""Optimizers whose ranks hold slots of different parameters."""
Table = dict[str, Tensor]
"""By name, in the same order on all copies: `param:NAME`, `opt:SLOT:NAME`."""


class PeerHealing:
    """Plans and makes the healings of one guard."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plan: dict[str, tuple[int, tuple[str, ...]]] = {}
        """By shard of this rank: the healthy rank, and the names of what is copied from it."""
        self._givers: set[int] = set()
        self.healed_at = -1
        """The last step at which a rank was healed: a second time there would be no help."""

    def plan(self, step: int) -> str:
        """Plan with all ranks who heals whom; why that is not possible, in words, else empty."""
        self._plan = {}
        self._givers = set()
        if self._context.agreement.size == 1:
            return "there is one rank only"
        if self.healed_at == step:
            return "it has been tried at this step"
        told = self._context.agreement.together(self._own_trouble, HEALING)
        damaged: set[str] = set()
        for facts in told:
            damaged.update(facts["bad"])
            if facts["why"]:
                return str(facts["why"])
        if not damaged:
            return "nothing that a peer holds is damaged"
        rest = self._context.agreement.together(lambda: self._own_rest(damaged), HEALING)
        return self._choose(told, rest, damaged)

    def heal(self, step: int) -> tuple[int, ...]:
        """Copy what the plan says, on all ranks; those that gave."""
        self._meet()
        self.healed_at = step
        for shard, table in sorted(self._tables().items()):
            source, names = self._plan.get(shard, (-1, ()))
            for name in names:
                self._copy(table[name], source)
        return tuple(sorted(self._givers))

    def copy_everything(self, source: int) -> None:
        """Give every rank the weights and slots of one, where no rank holds a shard."""
        self._meet()
        for table in self._tables().values():
            for tensor in table.values():
                self._copy(tensor, source)

    def _meet(self) -> None:
        if not self._context.agreement.all_here("the healing"):
            raise RankFault("not all ranks came to the healing")

    # --- what this rank holds

    def _tables(self) -> dict[str, Table]:
        """Weights and optimizer slots by shard; of an optimizer whose slots are spread none."""
        context = self._context
        whole = type(context.optimizer).__name__ not in SLOTS_APART
        tables: dict[str, Table] = {}
        trained = set(map(id, context.parameters))
        for parameter, name in parameter_names(context.roots, context.optimizer):
            if id(parameter) not in trained:
                continue
            table = tables.setdefault(shard_of(parameter), {})
            table[f"param:{name}"] = parameter
            state = context.optimizer.state.get(parameter, {}) if whole else {}
            for slot, value in _slots(state):
                table[f"opt:{slot}:{name}"] = value
        return tables

    def _own_trouble(self) -> dict[str, Any]:
        """Names of what is damaged here, by shard, or why no peer can help."""
        bad: set[str] = set()
        bad_shards: set[str] = set()
        shape: dict[str, str] = {}
        for shard, table in self._tables().items():
            shapes = {name: [str(t.dtype), list(local_part(t).shape)] for name, t in table.items()}
            structure = fact_fingerprint(shapes)
            shape[shard] = structure
            found = {name for name, tensor in table.items() if not is_finite(tensor)}
            bad |= found
            if found:
                bad_shards.add(shard)
        # `opt:SLOT:NAME` covers what is known as `opt:SLOT`
        covered = bad | {name.rpartition(":")[0] for name in bad}
        why = ""
        for name in stored_trouble(self._context):
            if name not in covered:
                why = f"{name} is damaged, of which no other rank holds a copy"
        return {"why": why, "bad": sorted(bad), "bad_shards": sorted(bad_shards), "shape": shape}

    def _own_rest(self, damaged: set[str]) -> dict[str, Any]:
        """Digests of all there is, and of all that is damaged nowhere."""
        whole: dict[str, int] = {}
        rest: dict[str, int] = {}
        for shard, table in self._tables().items():
            numbers = dict(zip(table, read_checksums(checksums(table.values())), strict=True))
            whole[shard] = combined(numbers.values())
            rest[shard] = combined(n for name, n in numbers.items() if name not in damaged)
        return {"whole": whole, "rest": rest}

    # --- who heals whom

    def _choose(
        self,
        told: Sequence[Mapping[str, Any]],
        rest: Sequence[Mapping[str, Any]],
        damaged: set[str],
    ) -> str:
        """The same answer on every rank: it is made of what all have told."""
        own = told[self._context.agreement.rank]["shape"]
        for shard in sorted({shard for facts in told for shard in facts["bad_shards"]}):
            healthy, why = self._healthy(shard, told, rest)
            if why:
                return why
            self._givers.add(healthy)
            if shard in own:
                names = tuple(name for name in self._tables()[shard] if name in damaged)
                self._plan[shard] = (healthy, names)
        return ""

    def _healthy(
        self, shard: str, told: Sequence[Mapping[str, Any]], rest: Sequence[Mapping[str, Any]]
    ) -> tuple[int, str]:
        """The first rank that holds this shard undamaged, or why none can be trusted."""
        members = self._context.agreement.members
        seen: set[tuple[str, int]] = set()
        whole: dict[int, int] = {}
        for place, (facts, digests) in enumerate(zip(told, rest, strict=True)):
            if shard not in facts["shape"]:
                continue
            seen.add((facts["shape"][shard], digests["rest"][shard]))
            if shard not in facts["bad_shards"]:
                whole[members[place]] = digests["whole"][shard]
        if not whole:
            return -1, "no rank that holds the same is undamaged"
        if len(seen) > 1 or len(set(whole.values())) > 1:
            return -1, "the ranks do not hold copies of the same weights"
        proved = bool(shard) or self._context.agreement.mode == "spread"
        if not proved and not next(iter(seen))[1]:
            return -1, "nothing is left to show that the ranks hold copies"
        return next(iter(whole)), ""

    @torch.no_grad()
    def _copy(self, tensor: Tensor, source: int) -> None:
        """Copy one tensor from a rank to all that hold the same part of it."""
        values = dense_values(tensor).detach()
        # sent from the device of the weights: a count kept on the host may have no backend there
        device = local_part(self._context.parameters[0]).device
        sent = values.contiguous().to(device)
        self._context.agreement.broadcast(sent, source, _copies_group(tensor))
        values.copy_(sent)


def _slots(state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Mapping):
        for slot in sorted(state, key=str):
            if isinstance(state[slot], Tensor):
                yield str(slot), state[slot]


def _copies_group(tensor: Tensor) -> Any:
    """The process group of the ranks that hold the same part; None for all ranks of the guard."""
    if not shard_of(tensor):
        return None
    given: Any = tensor
    for dimension, placement in enumerate(given.placements):
        if placement.is_replicate():
            return given.device_mesh.get_group(dimension)
    return None


# --- Weights that are not the same on every rank: experts, pipeline stages, ensembles.


APART = ("rng", "loader")
"""Facts that every rank has its own of in any case, and the tensors that go with them."""
NOT_COMPARED = (*APART, "guard", "ranks", "nonfinite_ok")
MOST = 4 * 2**30
"""Bytes of other ranks' weights that pass through rank 0's memory at most."""
WAY_OUT = "save each rank's own weights with torch.save, or all with torch.distributed.checkpoint"

RANK_WEIGHTS = "the weights of a checkpoint"
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
            told["prints"]
            for told in agreement.together(lambda: self._told_prints(state), RANK_WEIGHTS)
        ]
        first = _first_difference(prints)
        mine = _own_part(state, prints[0], prints[agreement.rank])
        size = sum(_bytes(tensor) for tensor in mine["tensors"].values())
        sizes = [told["size"] for told in agreement.together(lambda: {"size": size}, RANK_WEIGHTS)]
        if sum(sizes) > MOST:
            amount = f"{sum(sizes) / 2**30:.1f} GiB of them"
            return {}, f"the ranks hold different weights ({first}), {amount}: {WAY_OUT}"
        parts = agreement.together(lambda: {"part": _portable(mine)}, RANK_WEIGHTS)
        self._say_once(first)
        return {str(rank): told["part"] for rank, told in enumerate(parts) if rank}, ""

    def keep_apart(self, state: SavedState) -> dict[str, Any]:
        """Name what this rank holds otherwise than the first one, in a state that all ranks write.

        Those tensors stay on their rank; returned is what each rank has and lacks, by rank.
        """
        agreement = self._context.agreement
        prints = [
            told["prints"]
            for told in agreement.together(lambda: self._told_prints(state), RANK_WEIGHTS)
        ]
        mine = _own_part(state, prints[0], prints[agreement.rank])
        for name in mine["tensors"]:
            state.tensors[f"rank/{agreement.rank}/{name}"] = state.tensors.pop(name)
        own = {"lacks": mine["lacks"], "facts": mine["facts"], "has": sorted(mine["tensors"])}
        told = agreement.together(lambda: {"own": own}, RANK_WEIGHTS)
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
    # Names of what ranks hold of their own.
    # by the facts, which all ranks have alike: of a state of shards a rank reads its own part only
    named = {name for own in ranks.values() for name in own.get("has", ())}
    if not named:
        named = {name.split("/", 2)[2] for name in filter(_of_rank, tensors)}
    held_apart = sorted(named)
    for bare in held_apart:
        # Is it a trained weight, or a slot of an optimizer that is spread over the ranks?
        if bare.startswith("optimizer"):
            of_training = True
        else:
            of_training = bare.partition("/")[2] in trained or bare.partition(":")[2] in trained
        if of_training:
            raise StoreError(
                f"the checkpoint holds other values for each of {len(ranks) + 1} ranks "
                f"(first {bare}) and this run has {size}: restore it with {len(ranks) + 1}."
            )


def _trained(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group["params"]}


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


# --- Bring the loader of every rank back to its place, also with another number of ranks.


def resume_data(
    context: Context, feed: ResumableLoader, state: SavedState, random_numbers: RngState | None
) -> None:
    """Go to this rank's stored place; a rank that has none goes to the one that all others share.

    Every rank reads the same checkpoint, so all come to the same answer without an exchange.
    """
    agreement = context.agreement
    stored = {int(rank): place for rank, place in state.facts.get("loader", {}).items()}
    places: set[tuple[int, int]] = set()
    for position in stored.values():
        place = tree_from_json(position, state.tensors)
        places.add((int(place["epoch"]), int(place["delivered"])))
    shared = places.pop() if len(places) == 1 else None
    own = stored.get(agreement.rank)
    if own is not None:
        feed.go_to(tree_from_json(own, state.tensors), random_numbers)
    elif shared is not None:
        feed.go_to_number(*shared)
    if agreement.rank == 0 and len(stored) != agreement.size:
        same_ranks = len(state.facts.get("saved_alone", {}).get("ranks", ())) == agreement.size
        story = _story(stored.keys(), agreement.size, shared, same_ranks=same_ranks)
        context.outputs.note("checkpoint", story)


def _story(
    stored: Collection[int], size: int, shared: tuple[int, int] | None, *, same_ranks: bool
) -> str:
    """What becomes of the data with another number of ranks than the checkpoint has places for.

    `same_ranks`: there were as many, and one of them saved alone.
    """
    if not stored:
        return "the checkpoint holds no place in the data: the loader starts at the beginning"
    said = f"the checkpoint holds places in the data for {len(stored)} ranks, this run has {size}"
    without = [str(rank) for rank in range(size) if rank not in stored]
    if without and shared is None:
        said += f": ranks {', '.join(without)} START THE DATA AGAIN, for the places differ"
    elif without:
        epoch, number = shared or (0, 0)
        place = f"batch {number} of pass {epoch}, as the others"
        said += f": ranks {', '.join(without)} go on at {place}, with random numbers of their own"
    if same_ranks:
        return said
    share = "each rank's share of the data is another one now"
    return f"{said}; {share}: until this pass ends some samples come twice and some not at all"

"""Heal a damaged rank from a healthy one that holds the same weights and optimizer slots.

A copy is a peer only if everything that is not damaged is the same, bit for bit, on both: members
of an ensemble, experts and stages never heal each other. All ranks plan it together and take part
in it; those that are healthy get the bits they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.engine.incident.closer_look import stored_trouble
from stepguard.sentinel.rank_agreement import RankFault
from stepguard.state.fingerprint import checksums, combined, fact_fingerprint, read_checksums
from stepguard.tensors.names import parameter_names
from stepguard.tensors.sharding import shard_of
from stepguard.tensors.values import dense_values, is_finite, local_part

WHAT = "healing from a peer"
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
        told = self._context.agreement.together(self._own_trouble, WHAT)
        damaged: set[str] = set()
        for facts in told:
            damaged.update(facts["bad"])
            if facts["why"]:
                return str(facts["why"])
        if not damaged:
            return "nothing that a peer holds is damaged"
        rest = self._context.agreement.together(lambda: self._own_rest(damaged), WHAT)
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
            shape[shard] = _structure(table)
            found = _damaged(table)
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


def _damaged(table: Table) -> set[str]:
    return {name for name, tensor in table.items() if not is_finite(tensor)}


def _slots(state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Mapping):
        for slot in sorted(state, key=str):
            if isinstance(state[slot], Tensor):
                yield str(slot), state[slot]


def _structure(table: Table) -> str:
    """Names, shapes and dtypes: copies have the same."""
    shapes = {name: [str(t.dtype), list(local_part(t).shape)] for name, t in table.items()}
    return fact_fingerprint(shapes)


def _copies_group(tensor: Tensor) -> Any:
    """The process group of the ranks that hold the same part; None for all ranks of the guard."""
    if not shard_of(tensor):
        return None
    given: Any = tensor
    for dimension, placement in enumerate(given.placements):
        if placement.is_replicate():
            return given.device_mesh.get_group(dimension)
    return None

"""Copies of one model on several ranks: a number for their content, who differs, who heals whom.

Ranks whose gradients of a step are the same bits train one model: nothing but an exchange makes
them equal. Their weights have to be the same bits as well. Ranks with gradients of their own
(experts, stages, ensembles) are not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.ranks.agreement import Agreement, RankFault
from stepguard.report.phrases import count
from stepguard.state.batch import Step, named_tensors
from stepguard.tensors.names import parameter_names, shard_of
from stepguard.tensors.values import dense_values, is_finite, is_lazy, local_part

# --- A number for the content of a tensor, taken on its own device: equal bits, equal number.


PIECE = 1 << 20
"""Elements that are weighed at a time, so that the memory this takes is bounded."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return a number for each tensor, on its device and not waited for; None where there is none.

    Of a tensor that is spread over ranks it is the number of this rank's part.
    """
    found: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or is_lazy(tensor) or tensor.is_meta or tensor.is_nested:
            found.append(None)
        else:
            found.append(_weighed(dense_values(tensor)))
    return found


def read_checksums(sums: Iterable[Tensor | None]) -> list[int]:
    """Wait for the numbers; 0 where there is none."""
    waiting = list(sums)
    there = [number for number in waiting if number is not None]
    if not there:
        return [0] * len(waiting)
    device = there[0].device
    numbers = iter(torch.stack([number.to(device) for number in there]).tolist())
    return [0 if number is None else int(next(numbers)) for number in waiting]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape, dtype and number of each tensor."""
    numbers = read_checksums(checksums(tensors.values()))
    found: dict[str, str] = {}
    for (name, tensor), number in zip(tensors.items(), numbers, strict=True):
        found[name] = f"{tensor.dtype}{list(tensor.shape)}:{number}"
    return found


def fact_fingerprint(value: Any) -> str:
    """Return a digest of a JSON value."""
    content = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def combined(numbers: Iterable[int]) -> str:
    """One digest for several numbers, empty where all of them are 0."""
    given = list(numbers)
    return fact_fingerprint(given) if any(given) else ""


def _weighed(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits, each times an odd number of its place; int64 wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    for piece in torch.split(flat.view(INTEGERS[flat.element_size()]), PIECE):
        places = torch.arange(piece.numel(), device=piece.device, dtype=torch.int64)
        # a plain sum would not see two elements that changed places
        weights = (places * 0x2545F4914F6CDD1D) | 1
        total = total * 31 + (piece.to(torch.int64) * weights).sum()
    return total


# --- Which ranks differ from the others of their kind.


T = TypeVar("T", bound=Hashable)
Part = Mapping[str, tuple[int, int]]
"""By the name of a parameter: the numbers of its values and of its gradient; 0 for a gradient that
is missing or 0 throughout, which proves nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDigest:
    """What one rank reports of itself between two steps."""

    rank: int
    parts: Mapping[str, tuple[str, str]]
    """By shard: one digest of all parameters this rank holds of it, and one of their gradients."""
    committed: bool = True
    """The last step went through: gradients of one that was dropped say nothing."""
    rates: tuple[float, ...] = ()
    sharded: bool = False
    """Ranks hold parts of one model, so they belong together whatever their gradients are."""
    batch: str = ""
    """Digest of the last step's batch; empty where it was not seen."""
    batch_before: str = ""
    """The batch at the comparison before."""
    sampler: str = ""
    """Seed and epoch of the sampler that divides the data among ranks, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Ranks that differ from the others of their kind."""

    ranks: tuple[int, ...]
    """Ranks that differ; all ranks if there is no majority."""
    agree: tuple[int, ...]
    """The majority; empty where there is none."""
    what: str = ""
    """The first parameter that differs, or the values."""
    count: int = 1
    """Parameters that differ."""


def together(told: Sequence[RankDigest]) -> list[tuple[int, ...]]:
    """Return groups of at least two ranks that train copies, or parts, of one model."""
    if any(digest.sharded for digest in told):
        return [tuple(digest.rank for digest in told)]
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for digest in told:
        gradients = [(shard, gradient) for shard, (_, gradient) in sorted(digest.parts.items())]
        if any(gradient for _, gradient in gradients):
            groups.setdefault(tuple(gradients), []).append(digest.rank)
    return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]


def shards_that_differ(told: Sequence[RankDigest]) -> set[str]:
    """Name the shards that several ranks hold, and not with the same weights and gradients."""
    found: set[str] = set()
    first: dict[str, tuple[str, str]] = {}
    for digest in told:
        for shard, seen in digest.parts.items():
            if first.setdefault(shard, seen) != seen:
                found.add(shard)
    return found


def odd_facts(told: Sequence[RankDigest], words: Mapping[int, str]) -> Odd | None:
    """Find the ranks of one model that do not say what the others do; empty words are unknown."""
    for ranks in together(told):
        odd = _odd_one({rank: words[rank] for rank in ranks})
        if odd is not None and all(words[rank] for rank in ranks):
            # those that differ, and one of the others
            shown = (*odd.ranks[:4], *odd.agree[:1])
            return replace(odd, what=", ".join(f"rank {rank}: {words[rank]}" for rank in shown))
    return None


def odd_weights(parts: Mapping[int, Mapping[str, Part]]) -> tuple[Odd | None, str]:
    """Compare parameter by parameter; `parts` by rank and shard.

    Returns who has drifted, and the first parameter that ranks train on their own, or "".
    """
    holders_of: dict[str, dict[int, Part]] = {}
    for rank, shards in parts.items():
        for shard, part in shards.items():
            holders_of.setdefault(shard, {})[rank] = part
    drifted: list[Odd] = []
    own = ""
    for holders in holders_of.values():
        for name in next(iter(holders.values())):
            copies = _copies(name, holders)
            if len(holders) > 1 and not copies:
                own = own or name
            for ranks in copies:
                odd = _odd_one({rank: holders[rank][name][0] for rank in ranks})
                if odd is not None:
                    drifted.append(replace(odd, what=name))
    if not drifted:
        return None, own
    return replace(drifted[0], count=len(drifted)), own


def same_batches(told: Sequence[RankDigest]) -> tuple[int, ...]:
    """Name ranks of one model that read the same batch, twice in a row and not always the same."""
    if any(digest.sharded for digest in told):
        # ranks of a tensor-parallel group read the same on purpose
        return ()
    for ranks in together(told):
        seen: dict[tuple[str, str], list[int]] = {}
        for digest in told:
            known = digest.batch and digest.batch_before
            # a batch that never changes is meant
            if digest.rank in ranks and known and digest.batch != digest.batch_before:
                seen.setdefault((digest.batch, digest.batch_before), []).append(digest.rank)
        for alike in seen.values():
            if len(alike) > 1:
                return tuple(alike)
    return ()


def _copies(name: str, holders: Mapping[int, Part]) -> list[tuple[int, ...]]:
    """Groups of ranks that hold copies of one parameter, by its gradient; else by all of them."""
    groups: dict[object, list[int]] = {}
    for rank, part in holders.items():
        evidence: object = part[name][1]
        if not evidence:
            every = tuple(gradient for _, gradient in part.values())
            evidence = every if any(every) else ("nothing", rank)
        groups.setdefault(evidence, []).append(rank)
    return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]


def _odd_one(values: Mapping[int, T]) -> Odd | None:
    """Ranks that differ from the majority; all ranks if there is none."""
    counted = Counter(values.values())
    if len(counted) < 2:
        return None
    usual, times = counted.most_common(1)[0]
    if 2 * times <= len(values):
        return Odd(ranks=tuple(values), agree=())
    agree = tuple(rank for rank, value in values.items() if value == usual)
    return Odd(ranks=tuple(rank for rank in values if rank not in agree), agree=agree)


# --- Compare the ranks now and then.


class Trained(Protocol):
    """What is known of the live objects of this rank."""

    model: nn.Module
    optimizer: Optimizer
    agreement: Agreement
    roots: dict[str, nn.Module]
    sharded: bool
    step: int

    @property
    def parameters(self) -> list[Tensor]: ...
    @property
    def lr(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What ranks of one model do not have in common, though they should."""

    kind: str
    """`replica_drift` or `same_data`."""
    summary: str
    evidence: dict[str, float | int | str]
    rank: int | None = None
    """The one rank that differs, where it is one."""
    healthy: int | None = None
    """A rank of the majority whose weights the others can be given; None where that is no cure."""


class RankComparison:
    """Compares weights, learning rates and data of the ranks every `compare_every` steps."""

    def __init__(
        self,
        trained: Trained,
        every: int,
        sampler: Callable[[], str],
        note: Callable[[str], None],
        report: Callable[[Difference], bool],
    ) -> None:
        """`report` takes what was found, and returns whether it was put right."""
        self._trained = trained
        self._every: int | None = every
        self._sampler = sampler
        self._note = note
        self._report = report
        self._seen = -1
        """The last step before which ranks were compared."""
        self._committed = -1
        self._gradients: list[Tensor | None] = []
        """On the device: numbers of the last step's gradients, in the order of the parameters."""
        self._batch: list[Tensor | None] = []
        self._batch_before = ""
        self._reported: set[str] = set()
        """Kinds that have been reported and have not been fine since."""
        self._fault: Exception | None = None

    # --- while a step runs: waits for nothing

    def before_update(self) -> None:
        """Remember the gradients of a step after which ranks are compared."""
        if not self._due_after(self._trained.step):
            return
        try:
            self._gradients = checksums([p.grad for p in self._trained.parameters])
        except Exception as fault:
            # raised where all ranks are, so that none waits for this one
            self._fault = fault

    def committed(self, step: Step) -> None:
        """Remember the batch of such a step."""
        if not self._due_after(step.index):
            return
        self._committed = step.index
        self._batch = checksums(tensor for _, tensor in named_tensors(list(step.micro_batches)))

    def _due_after(self, step: int) -> bool:
        if self._every is None:
            return False
        # early once, since a wrong seed, rate or sampler is there from the beginning
        return step == 0 or (step + 1) % self._every == 0

    # --- between two steps

    def due(self) -> bool:
        """Is it time to compare?"""
        step = self._trained.step
        return step != self._seen and step > 0 and self._due_after(step - 1)

    def do(self) -> None:
        """Compare with the other ranks; where not all of them come, never again."""
        self._seen = self._trained.step
        try:
            digests = self._exchange(self._digest)
            if all(digest.committed for digest in digests):
                self._compare(digests)
        except RankFault as fault:
            self._every = None
            self._note(f"the ranks are no longer compared: {str(fault).removesuffix('.')}")

    def _exchange(self, look: Callable[[], Any]) -> list[Any]:
        told = self._trained.agreement.together(
            lambda: {"own": look()}, "a comparison of the ranks"
        )
        return [each["own"] for each in told]

    def _compare(self, digests: list[RankDigest]) -> None:
        weights: Odd | None = None
        shards = shards_that_differ(digests)
        if shards:
            weights = self._by_parameter(shards)
        rates = odd_facts(digests, {digest.rank: _rates(digest.rates) for digest in digests})
        self._tell("replica_drift", _drift(weights, rates))
        samplers = odd_facts(digests, {digest.rank: digest.sampler for digest in digests})
        self._tell("same_data", _same_data(same_batches(digests), samplers))

    def _tell(self, kind: str, found: Difference | None) -> None:
        if found is None:
            self._reported.discard(kind)
        elif kind not in self._reported and not self._report(found):
            self._reported.add(kind)

    def _digest(self) -> RankDigest:
        if self._fault is not None:
            raise self._fault
        parts: dict[str, tuple[str, str]] = {}
        for shard, part in self._parts().items():
            weights = combined(number for number, _ in part.values())
            parts[shard] = (weights, combined(number for _, number in part.values()))
        batch = combined(read_checksums(self._batch))
        before = self._batch_before
        self._batch_before = batch
        return RankDigest(
            rank=self._trained.agreement.world_rank,
            parts=parts,
            committed=self._committed == self._trained.step - 1,
            rates=self._trained.lr,
            sharded=self._trained.sharded,
            batch=batch,
            batch_before=before,
            sampler=self._sampler(),
        )

    def _parts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Numbers of values and gradient of each parameter, by the part of the model it is."""
        trained = self._trained
        names = {id(p): name for p, name in parameter_names(trained.roots, trained.optimizer)}
        parameters = trained.parameters
        values = read_checksums(checksums(parameters))
        gradients = read_checksums(self._gradients)
        if len(gradients) != len(values):
            # parameters were added since
            gradients = [0] * len(values)
        ignored = set(getattr(trained.model, "parameters_to_ignore", ()))
        parts: dict[str, dict[str, tuple[int, int]]] = {}
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            name = names[id(parameter)]
            if name not in ignored:
                parts.setdefault(shard_of(parameter), {})[name] = (value, gradient)
        # a stage of a pipeline is the same only as the same stage
        return {f"{shard} {fact_fingerprint(list(part))}": part for shard, part in parts.items()}

    def _by_parameter(self, shards: set[str]) -> Odd | None:
        """Ask all ranks for every parameter of the shards that differ, and say which does."""
        parts = self._exchange(lambda: {s: p for s, p in self._parts().items() if s in shards})
        drifted, own = odd_weights(dict(zip(self._trained.agreement.members, parts, strict=True)))
        if own and not self._trained.sharded and "own" not in self._reported:
            self._reported.add("own")
            self._note(
                f"the ranks have different gradients, first of {own}: their weights are "
                "not copies of each other and are not compared"
            )
        return drifted


def _drift(weights: Odd | None, rates: Odd | None) -> Difference | None:
    found = weights or rates
    if found is None:
        return None
    evidence: dict[str, float | int | str] = {"ranks": _ranks(found.ranks)}
    if found.agree:
        evidence["agree"] = _ranks(found.agree)
    sentences = []
    if weights is not None:
        evidence["parameters"] = weights.count
        evidence["tensor"] = f"param:{weights.what}"
        sentences.append(_weights_differ(weights))
    if rates is not None:
        evidence["rates"] = rates.what
        sentences.append(f"the learning rates differ ({rates.what})")
    healthy = None
    if weights is not None and weights.agree and rates is None:
        # another learning rate would drive them apart again
        healthy = weights.agree[0]
    return Difference(
        kind="replica_drift",
        summary="; ".join(sentences),
        evidence=evidence,
        rank=found.ranks[0] if found.agree and len(found.ranks) == 1 else None,
        healthy=healthy,
    )


def _same_data(same: tuple[int, ...], samplers: Odd | None) -> Difference | None:
    evidence: dict[str, float | int | str] = {}
    if samplers is not None:
        evidence = {"ranks": _ranks(samplers.ranks), "samplers": samplers.what}
        summary = f"the samplers of the ranks divide the data differently ({samplers.what})"
    if same:
        evidence["ranks"] = _ranks(same)
        summary = f"{_named(same)} read the same batch at this step and at the comparison before"
    if not evidence:
        return None
    return Difference(kind="same_data", summary=summary, evidence=evidence)


def _weights_differ(odd: Odd) -> str:
    what = f"param:{odd.what}"
    if odd.count > 1:
        what += f" and {count(odd.count - 1, 'more parameter')}"
    if odd.agree:
        verb = "holds" if len(odd.ranks) == 1 else "hold"
        return f"{_named(odd.ranks)} {verb} different weights from {_named(odd.agree)}: {what}"
    return (
        f"{_named(odd.ranks)} no longer hold the same weights, so one of them has drifted: {what}"
    )


def _rates(rates: tuple[float, ...]) -> str:
    shown = [f"{rate:g}" for rate in rates]
    return " / ".join(shown[:1] if len(set(shown)) == 1 else shown) or "none"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranks(ranks)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        return f"{shown} and {len(ranks) - 8} more"
    return shown


# --- Heal a damaged rank from a healthy one that holds the same weights and optimizer slots.


SLOTS_APART = ("ZeroRedundancyOptimizer",)
"""Optimizers whose ranks hold slots of different parameters."""
Table = dict[str, Tensor]
"""By name, in the same order on all copies: `param:NAME`, `opt:SLOT:NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds of a shard of which some rank's tensors are damaged."""

    structure: str
    """Digest of names, dtypes and shapes."""
    whole: str
    """Digest of everything."""
    rest: str
    """Digest of everything that is damaged nowhere; empty if nothing is left."""
    damaged: bool


class PeerHealing:
    """Plans and makes the healings of one guard."""

    def __init__(self, trained: Trained, stored_trouble: Callable[[], list[str]]) -> None:
        self._trained = trained
        self._stored_trouble = stored_trouble
        self.healed_at = -1
        """The last step at which a rank was healed: a second time there would be no help."""
        self.givers: dict[str, int] = {}
        """The plan: the healthy rank of each shard."""
        self.damaged: set[str] = set()
        """The plan: names of the tensors to copy from it."""

    def own_damage(self) -> list[str]:
        """Names of what is damaged here and may be held by a peer."""
        found: list[str] = []
        for table in self._tables().values():
            found += [name for name, tensor in table.items() if not is_finite(tensor)]
        return found

    def offer(self, damaged: set[str]) -> dict[str, Any]:
        """What this rank holds of the shards, or why no peer can help it."""
        # `opt:SLOT:NAME` covers what is known as `opt:SLOT`
        covered = damaged | {name.rpartition(":")[0] for name in damaged}
        why = ""
        for name in self._stored_trouble():
            if name not in covered:
                why = f"{name} is damaged, and no other rank holds a copy"
        held: dict[str, Held] = {}
        for shard, table in self._tables().items():
            shapes = {name: [str(t.dtype), list(local_part(t).shape)] for name, t in table.items()}
            numbers = dict(zip(table, read_checksums(checksums(table.values())), strict=True))
            held[shard] = Held(
                structure=fact_fingerprint(shapes),
                whole=combined(numbers.values()),
                rest=combined(n for name, n in numbers.items() if name not in damaged),
                damaged=not all(map(is_finite, table.values())),
            )
        return {"why": why, "held": held}

    def plan(self, offers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], str]:
        """Return which rank heals each shard, or why that is impossible."""
        if self.healed_at == self._trained.step:
            return {}, "healing was already tried at this step"
        for offer in offers:
            if offer["why"]:
                return {}, str(offer["why"])
        members = self._trained.agreement.members
        holders: dict[str, dict[int, Held]] = {}
        for rank, offer in zip(members, offers, strict=True):
            for shard, held in offer["held"].items():
                holders.setdefault(shard, {})[rank] = held
        givers: dict[str, int] = {}
        for shard, by_rank in holders.items():
            if any(held.damaged for held in by_rank.values()):
                givers[shard], why = self._giver(shard, by_rank)
                if why:
                    return {}, why
        return givers, "" if givers else "nothing that a peer holds is damaged"

    def _giver(self, shard: str, by_rank: Mapping[int, Held]) -> tuple[int, str]:
        """The first rank that holds this shard undamaged, or why none can be trusted."""
        whole = {rank: held.whole for rank, held in by_rank.items() if not held.damaged}
        if not whole:
            return -1, "every rank that holds a copy is damaged"
        seen = {(held.structure, held.rest) for held in by_rank.values()}
        if len(seen) > 1 or len(set(whole.values())) > 1:
            return -1, "the ranks do not hold copies of the same weights"
        proved = bool(shard) or self._trained.agreement.mode == "spread"
        if not proved and not next(iter(seen))[1]:
            return -1, "nothing is left to show that the ranks hold copies"
        return next(iter(whole)), ""

    def heal(self) -> tuple[int, ...]:
        """Copy what the plan says, on all ranks; those that gave."""
        self._meet()
        self.healed_at = self._trained.step
        for shard, table in sorted(self._tables().items()):
            if shard in self.givers:
                for name in table:
                    if name in self.damaged:
                        self._copy(table[name], self.givers[shard])
        return tuple(sorted(set(self.givers.values())))

    def copy_everything(self, source: int) -> None:
        """Give every rank the weights and slots of one, where no rank holds a shard."""
        self._meet()
        for table in self._tables().values():
            for tensor in table.values():
                self._copy(tensor, source)

    def _meet(self) -> None:
        if not self._trained.agreement.all_here("the healing"):
            raise RankFault("not all ranks joined the healing")

    def _tables(self) -> dict[str, Table]:
        """Weights and optimizer slots by shard; of an optimizer whose slots are spread none."""
        trained = self._trained
        whole = type(trained.optimizer).__name__ not in SLOTS_APART
        tables: dict[str, Table] = {}
        updated = set(map(id, trained.parameters))
        for parameter, name in parameter_names(trained.roots, trained.optimizer):
            if id(parameter) not in updated:
                continue
            table = tables.setdefault(shard_of(parameter), {})
            table[f"param:{name}"] = parameter
            slots = trained.optimizer.state.get(parameter) if whole else None
            if isinstance(slots, Mapping):
                for slot in sorted(slots, key=str):
                    if isinstance(slots[slot], Tensor):
                        table[f"opt:{slot}:{name}"] = slots[slot]
        return tables

    @torch.no_grad()
    def _copy(self, tensor: Tensor, source: int) -> None:
        """Copy one tensor from a rank to all that hold the same part of it."""
        values = dense_values(tensor).detach()
        # sent from the device of the weights: a count kept on the host may have no backend there
        device = local_part(self._trained.parameters[0]).device
        sent = values.contiguous().to(device)
        group = None
        if shard_of(tensor):
            given: Any = tensor
            for dimension, placement in enumerate(given.placements):
                if placement.is_replicate():
                    group = given.device_mesh.get_group(dimension)
                    break
        self._trained.agreement.broadcast(sent, source, group)
        values.copy_(sent)

"""Compare what ranks report: which hold copies of one model, and which has drifted.

Ranks whose gradients of a step are the same bits train one model: nothing but an exchange makes
them equal. Their weights have to be the same bits as well. Ranks with gradients of their own
(experts, stages, ensembles, local SGD between two averages) are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

NO_GRADIENT = 0
"""Digest of a gradient that is missing or 0 throughout: equal by chance, so it proves nothing."""

T = TypeVar("T", bound=Hashable)
Part = Mapping[str, tuple[int, int]]
"""By the name of a parameter: the digests of its values and of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDigest:
    """What one rank tells of itself between two steps."""

    rank: int
    weights: Mapping[str, int]
    """By shard: one digest of all parameters this rank holds of it."""
    gradients: Mapping[str, int]
    rates: tuple[float, ...] = ()
    sharded: bool = False
    """Ranks hold parts of one model, so they belong together whatever their gradients are."""
    batch: int | None = None
    """Digest of the last step's batch; None where it was not seen."""
    batch_before: int | None = None
    """That of the comparison before."""
    sampler: str = ""
    """Seed and epoch of the sampler that divides the data among ranks, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Ranks that differ from the others of their kind."""

    ranks: tuple[int, ...]
    """Those that differ; all of them where no majority tells."""
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
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for digest in told:
        key = tuple(sorted(digest.gradients.items()))
        if any(value != NO_GRADIENT for value in digest.gradients.values()):
            groups.setdefault(key, []).append(digest.rank)
    return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]


def shards_that_differ(told: Sequence[RankDigest]) -> set[str]:
    """Name the shards that several ranks hold, and not with the same weights and gradients."""
    found: set[str] = set()
    first: dict[str, tuple[int, int]] = {}
    for digest in told:
        for shard, weights in digest.weights.items():
            seen = (weights, digest.gradients.get(shard, NO_GRADIENT))
            if first.setdefault(shard, seen) != seen:
                found.add(shard)
    return found


def odd_rates(told: Sequence[RankDigest]) -> Odd | None:
    """Find the ranks of one model that do not use the learning rates of the others."""
    by_rank = {digest.rank: digest.rates for digest in told}
    for ranks in together(told):
        odd = _odd_one({rank: by_rank[rank] for rank in ranks})
        if odd is not None:
            said = [f"rank {rank}: {_rates(by_rank[rank])}" for rank in _one_of_each(odd)]
            return replace(odd, what=", ".join(said))
    return None


def odd_weights(parts: Mapping[int, Mapping[str, Part]]) -> tuple[Odd | None, str]:
    """Compare parameter by parameter; `parts` by rank and shard.

    Returns who has drifted, and the first parameter that ranks train on their own, or "".
    """
    drifted: list[Odd] = []
    own = ""
    for holders in _holders(parts):
        for name in next(iter(holders.values())):
            copies = _copies(name, holders)
            if len(holders) > 1 and not copies:
                own = own or name
            found = []
            for ranks in copies:
                odd = _odd_one({rank: holders[rank][name][0] for rank in ranks})
                if odd is not None:
                    found.append(replace(odd, what=name))
            drifted += found
    if not drifted:
        return None, own
    return replace(drifted[0], count=len(drifted)), own


def _holders(parts: Mapping[int, Mapping[str, Part]]) -> list[dict[int, Part]]:
    """For each shard, what each rank that holds it tells of it."""
    found: dict[str, dict[int, Part]] = {}
    for rank, shards in parts.items():
        for shard, part in shards.items():
            found.setdefault(shard, {})[rank] = part
    return list(found.values())


def same_batches(told: Sequence[RankDigest]) -> tuple[int, ...]:
    """Name ranks of one model that read the same batch, twice in a row and not always the same."""
    if any(digest.sharded for digest in told):
        # ranks of a tensor-parallel group read the same on purpose
        return ()
    changing = [digest for digest in told if _batches_change(digest)]
    for ranks in together(told):
        seen: dict[tuple[int | None, int | None], list[int]] = {}
        for digest in changing:
            if digest.rank in ranks:
                seen.setdefault((digest.batch, digest.batch_before), []).append(digest.rank)
        for alike in seen.values():
            if len(alike) > 1:
                return tuple(alike)
    return ()


def _batches_change(digest: RankDigest) -> bool:
    """Were two batches seen, and different ones? One that never changes is meant."""
    if digest.batch is None or digest.batch_before is None:
        return False
    return digest.batch != digest.batch_before


def odd_samplers(told: Sequence[RankDigest]) -> Odd | None:
    """Find the ranks of one model whose sampler divides the data in another way."""
    by_rank = {digest.rank: digest.sampler for digest in told}
    for ranks in together(told):
        if not all(by_rank[rank] for rank in ranks):
            continue
        odd = _odd_one({rank: by_rank[rank] for rank in ranks})
        if odd is not None:
            said = [f"rank {rank}: {by_rank[rank]}" for rank in _one_of_each(odd)]
            return replace(odd, what=", ".join(said))
    return None


def _copies(name: str, holders: Mapping[int, Part]) -> list[tuple[int, ...]]:
    """Groups of ranks that hold copies of one parameter, by its gradient; else by all of them."""
    groups: dict[object, list[int]] = {}
    for rank, part in holders.items():
        evidence: object = part[name][1]
        if evidence == NO_GRADIENT:
            every = tuple(gradient for _, gradient in part.values())
            evidence = every if any(every) else ("nothing", rank)
        groups.setdefault(evidence, []).append(rank)
    return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]


def _odd_one(values: Mapping[int, T]) -> Odd | None:
    """Who differs from the majority; all of them where more than half do not agree."""
    counted = Counter(values.values())
    if len(counted) < 2:
        return None
    usual, times = counted.most_common(1)[0]
    if 2 * times <= len(values):
        return Odd(ranks=tuple(values), agree=())
    agree = tuple(rank for rank, value in values.items() if value == usual)
    return Odd(ranks=tuple(rank for rank in values if rank not in agree), agree=agree)


def _one_of_each(odd: Odd) -> tuple[int, ...]:
    """The ranks whose values tell the difference: those that differ, and one of the others."""
    return (*odd.ranks[:4], *odd.agree[:1])


def _rates(rates: tuple[float, ...]) -> str:
    shown = [f"{rate:g}" for rate in rates]
    if len(set(shown)) == 1:
        return shown[0]
    return " / ".join(shown)

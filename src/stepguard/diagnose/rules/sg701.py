"""SG701: one rank made it, all ranks have it."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import PLAUSIBLE, Proof, Rule, code, prose
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    ranks = case.reading.bad_ranks
    world = max(case.facts.world_size, max(ranks, default=0) + 1)
    if not ranks or world < 2 or len(ranks) >= world:
        return None
    which = ", ".join(map(str, ranks))
    first = (
        f"rank {which} of {world} had a non-finite loss or gradient before any reduction; the "
        f"others were finite"
    )
    second = "the all-reduce then spread it to every rank"
    known = bool(case.origin and (case.origin.op or case.tensor))
    return Proof(confidence=PLAUSIBLE - 0.05 if known else 0.8, evidence=(first, second))


RULE = Rule(
    code="SG701",
    title="origin on one rank only",
    what=prose(
        """
        One process of a distributed run made the first bad value; the gradient reduction copied it to all.
        After the reduction every rank looks equally guilty.
        """
    ),
    why=prose(
        """
        Each rank reads its own shard, so a bad sample, an empty batch or a faulty device shows on one of
        them. If only that rank skips, collectives of different steps pair up and gradients are mixed
        silently.
        """
    ),
    how=prose(
        """
        Loss and gradient of each rank are judged before the reduction and the verdicts gathered. The cause on
        that rank is the finding beside this one.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Agree on the skip: reduce one flag with MAX before anyone decides (stepguard "
            "does)",
            snippet=code(
                """
                bad = [float(not shard.isfinite().all()) for shard in shards]
                agreed = max(bad)  # all_reduce(flag, op=ReduceOp.MAX)
                for shard in shards:
                    if not agreed:
                        (shard @ weight).mean().backward()
                """
            ),
        ),
        Remedy(
            title="Look at the shard and the device of that rank; a graph-connected zero keeps the "
            "collective in step",
            snippet=code(
                """
                for shard in shards:
                    local = (shard @ weight).mean()
                    (local if local.isfinite() else (weight * 0).sum()).backward()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        weight = torch.ones(2, requires_grad=True)
        shards = [torch.ones(3, 2), torch.ones(3, 2)]  # one per rank
        shards[1][2, 0] = float('inf')
        """
    ),
    bad=code(
        """
        for shard in shards:
            (shard @ weight).mean().backward()  # the sum over ranks is what DDP leaves everywhere
        """
    ),
    see=(
        "ecmwf/WeatherGenerator#2724",
        "NVIDIA/Megatron-LM#780",
    ),
)

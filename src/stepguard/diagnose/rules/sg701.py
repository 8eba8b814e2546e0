"""SG701: one rank made it, all ranks have it."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely, possible


def recognise(case: Case) -> Proof | None:
    ranks = case.reading.bad_ranks
    # the size of the world is not known after the fact, but a rank number tells a part of it
    world = max(case.facts.world_size, max(ranks, default=0) + 1)
    if not ranks or world < 2 or len(ranks) >= world:
        return None
    which = ", ".join(map(str, ranks))
    # where the place is known, its cause says more than the rank
    prove = likely
    if case.operated:
        prove = possible
    return prove(
        f"rank {which} of {world} had a non-finite loss or gradient before any reduction; the "
        f"others were finite",
        "the all-reduce then spread it to every rank",
    )


RULE = Rule(code="SG701", recognise=recognise, shown_by="record")

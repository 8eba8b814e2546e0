"""SG701 to SG705: ranks, hardware and the compiler."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, certain, likely, possible, rule


@rule(shown_by="record")
def sg701(case: Case) -> Proof | None:
    """One rank made it, all ranks have it."""
    ranks = case.reading.bad_ranks
    # the size of the world is not known after the fact, but a rank number bounds it from below
    world = max(case.facts.world_size, max(ranks, default=0) + 1)
    if not ranks or world < 2 or len(ranks) >= world:
        return None
    # where the place is known, its cause says more than the rank
    prove = possible if case.operated else likely
    return prove(world=world)


@rule(shown_by="inference")
def sg702(case: Case) -> Proof | None:
    """The replay of the bad step is clean."""
    evidence = case.evidence
    if case.where.reproduced is not False or evidence.compiled_only:
        return None
    if case.phase in ("input", "state", "checkpoint"):
        return None
    if case.impure:
        # the second call of the loss function was not the first: nothing else need be wrong
        shown = evidence.different_losses is not None or evidence.departs is not None
        return likely("not a function", shown=shown, losses=evidence.different_losses or ())
    different = evidence.same_bits is False
    return certain("transient", different=different, bad_grads=case.reading.bad_grads[:3])


@rule(shown_by="record")
def sg703(case: Case) -> Proof | None:
    """Only the compiled graph makes it."""
    # inductor fuses and reorders, so its rounding and its masks may differ from eager's
    if case.evidence.compiled_only:
        return certain()
    return None


@rule(shown_by="record")
def sg704(case: Case) -> Proof | None:
    """Copies of one model no longer hold the same weights, or are not updated alike."""
    if case.verdict.kind != "replica_drift":
        return None
    agree = str(case.said.get("agree") or "")
    # the first rank of the majority, to copy the weights from
    return certain(agree=agree, nobody=not agree, source=agree.partition(",")[0] or "0")


@rule(shown_by="record")
def sg705(case: Case) -> Proof | None:
    """Two ranks train on the same samples."""
    if case.verdict.kind == "same_data":
        return certain()
    return None

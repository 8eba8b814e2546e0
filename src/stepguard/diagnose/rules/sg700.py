"""SG702: the replay of the bad step is clean."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely, possible

# --- SG701: one rank made it, all ranks have it.


def recognise_sg701(case: Case) -> Proof | None:
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


SG701 = Rule(code="SG701", recognise=recognise_sg701, shown_by="record")


# --- SG702: the replay of the bad step is clean.


SAME_BITS = {
    None: "",
    True: "run again three times, it gives the same bits each time: the fault came from outside",
    False: "run again, it gives different bits each time: the step itself is nondeterministic",
}


def recognise_sg702(case: Case) -> Proof | None:
    if case.origin is None or case.origin.reproduced is not False:
        return None
    if case.evidence.compiled_only or case.phase in ("input", "state", "checkpoint"):
        return None
    if case.impure:
        return _not_a_function(case)
    return _transient(case)


def _transient(case: Case) -> Proof:
    first = (
        "the same step, replayed with the same weights, batch, buffers and random numbers, is "
        "finite"
    )
    if case.evidence.departs is not None:
        first = (
            f"replayed with the same weights, batch, buffers and random numbers, it is bad "
            f"otherwise: {case.evidence.departs}"
        )
    grads = ""
    if case.reading.bad_grads:
        grads = f"non-finite gradients were seen in {', '.join(case.reading.bad_grads[:3])}"
    where = ""
    if case.reading.bad_ranks:
        ranks = ", ".join(map(str, case.reading.bad_ranks))
        where = f"it was seen on rank {ranks} only: look at that device first"
    return certain(first, SAME_BITS[case.evidence.same_bits], case.verdict.summary, grads, where)


def _not_a_function(case: Case) -> Proof:
    """The second call of the loss function was not the first: nothing else need be wrong."""
    evidence = case.evidence
    shown = evidence.different_losses is not None or evidence.departs is not None
    first = (
        f"not reproduced: the loss function is {'' if shown else 'probably '}not a function of "
        f"its batch"
    )
    moved = ""
    if evidence.moves:
        moved = (
            f"running the step again changes {', '.join(evidence.moves)}, which no replay can put "
            f"back to before the step"
        )
    differ = ""
    if evidence.different_losses is not None:
        one, other = evidence.different_losses
        differ = f"two replays of the same step give the losses {one:.6g} and {other:.6g}"
    rest = "hardware or a race cannot be told from that; they are the less likely cause"
    departs = evidence.departs or ""
    return likely(
        first, moved, differ, departs, case.verdict.summary, rest, remedies=SG702.text.special
    )


SG702 = Rule(code="SG702", recognise=recognise_sg702, shown_by="inference")


# --- SG703: only the compiled graph makes it.


def recognise_sg703(case: Case) -> Proof | None:
    # inductor fuses and reorders, so its rounding and its masks may differ from eager's
    if not case.evidence.compiled_only:
        return None
    first = (
        "the compiled step is non-finite again; the same step run eagerly on the same weights "
        "and batch is finite"
    )
    return certain(first, case.verdict.summary)


SG703 = Rule(code="SG703", recognise=recognise_sg703, shown_by="record")


# --- SG704: copies of one model no longer hold the same weights, or are not updated alike.


def recognise_sg704(case: Case) -> Proof | None:
    if case.verdict.kind != "replica_drift":
        return None
    said = case.verdict.evidence or {}
    ranks = said.get("ranks", "")
    agree = said.get("agree", "")
    same = f"ranks {ranks} had the same gradients bit for bit, so they are copies of one model"
    if agree:
        same = f"rank {ranks} had the gradients of rank {agree} bit for bit: copies of one model"
    weights = ""
    if "tensor" in said:
        weights = f"{said['parameters']} parameters differ, first `{said['tensor']}`"
    rates = ""
    if "rates" in said:
        rates = f"learning rates differ: {said['rates']}"
    who = ""
    if not agree:
        who = "no majority tells which of them is right: with three ranks or more it would be named"
    return certain(same, weights, rates, who)


SG704 = Rule(code="SG704", recognise=recognise_sg704, shown_by="record")


# --- SG705: two ranks train on the same samples.


def recognise_sg705(case: Case) -> Proof | None:
    if case.verdict.kind != "same_data":
        return None
    said = case.verdict.evidence or {}
    samplers = ""
    if "samplers" in said:
        samplers = f"their samplers do not divide one order among them: {said['samplers']}"
    return certain(case.verdict.summary, samplers)


SG705 = Rule(code="SG705", recognise=recognise_sg705, shown_by="record")

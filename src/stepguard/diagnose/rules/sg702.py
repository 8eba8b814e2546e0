"""SG702: the replay of the bad step is clean."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely

SAME_BITS = {
    None: "",
    True: "run again three times, it gives the same bits each time: the fault came from outside",
    False: "run again, it gives different bits each time: the step itself is nondeterministic",
}


def recognise(case: Case) -> Proof | None:
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
        first, moved, differ, departs, case.verdict.summary, rest, remedies=RULE.text.special
    )


RULE = Rule(code="SG702", recognise=recognise, shown_by="inference")

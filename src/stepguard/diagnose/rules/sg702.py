"""SG702: the replay of the bad step is clean."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import LIKELY, Proof, Rule, code, prose
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    if (
        case.origin is None
        or case.evidence.compiled_only
        or case.phase in ("input", "state", "checkpoint")
    ):
        return None
    if case.origin.reproduced is not False:
        return None
    if case.impure:
        return _not_a_function(case)
    departs = case.evidence.departs
    first = (
        "the same step, replayed with the same weights, batch, buffers and random numbers, is "
        "finite"
    )
    if departs is not None:
        first = (
            f"replayed with the same weights, batch, buffers and random numbers, it is bad "
            f"otherwise: {departs}"
        )
    ranks = ", ".join(map(str, case.reading.bad_ranks))
    where = f"it was seen on rank {ranks} only: look at that device first" if ranks else ""
    grads = (
        f"non-finite gradients were seen in {', '.join(case.reading.bad_grads[:3])}"
        if case.reading.bad_grads
        else ""
    )
    unsteady = "run again, it gives different bits each time: the step itself is nondeterministic"
    steady = "run again three times, it gives the same bits each time: the fault came from outside"
    again = {None: "", False: unsteady, True: steady}[case.evidence.same_bits]
    return Proof(confidence=0.9, evidence=(first, again, case.verdict.summary, grads, where))


def _not_a_function(case: Case) -> Proof:
    """Nothing else need be wrong than that the second call of the loss function was not the first."""
    moved = ", ".join(case.evidence.moves)
    shown = case.evidence.different_losses is not None or case.evidence.departs is not None
    first = (
        f"not reproduced: the loss function is {'' if shown else 'probably '}not a function of "
        f"its batch"
    )
    seen = (
        f"running the step again changes {moved}, which no replay can put back to before the step"
        if moved
        else ""
    )
    differ = ""
    if case.evidence.different_losses is not None:
        one, other = case.evidence.different_losses
        differ = f"two replays of the same step give the losses {one:.6g} and {other:.6g}"
    departs = case.evidence.departs or ""
    rest = "hardware or a race cannot be told from that; they are the less likely cause"
    return Proof(
        confidence=LIKELY,
        evidence=(first, seen, differ, departs, case.verdict.summary, rest),
        remedies=(
            Remedy(
                title="Draw from torch's, numpy's or Python's global generator: those are restored "
                "for a replay"
            ),
            Remedy(
                title="Keep counters and running values in buffers of a module, and advance them "
                "after the step"
            ),
        ),
    )


RULE = Rule(
    code="SG702",
    title="not reproduced: transient (hardware, race)",
    what=prose(
        """
        The step was bad, its replay is not, or is bad in another way (-inf where +inf was seen). Either the loss
        function depends on more than its batch, or the numbers were right the second time and code and data are
        probably innocent.
        """
    ),
    why=prose(
        """
        First of all: the loss function is not a function of its batch. It draws from a generator of its own, counts
        its calls, anneals a temperature, keeps running values in a list or an attribute; the replay then computes
        something else. If it is pure: a device returned wrong results (silent data corruption, overheating, a
        failing board), memory was read before an asynchronous copy had finished, another thread changed the batch,
        a custom kernel races or reads uninitialised memory.
        """
    ),
    how=prose(
        """
        The bad step is replayed with weights, batch, buffers and RNG restored, and the kind of the loss (nan, +inf,
        -inf), of its named parts and the broken gradients are compared. Where they differ, the step runs again twice:
        finite losses that differ, or generators, counters, lists and tensors of the loss function that move, show a
        loss function that depends on more than its batch, and that is said first. Otherwise the step has no cause
        that a replay could show.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Do not touch the batch after handing it over: keep your own copy of what a "
            "worker may overwrite",
            snippet=code(
                """
                batch = shared.clone()
                refill(shared)  # the loader thread
                loss = (batch @ weight).mean()
                """
            ),
        ),
        Remedy(
            title="Repeat a step twice and compare bit by bit; a device that disagrees with itself "
            "has to go",
            snippet=code(
                """
                batch = shared.clone()
                first, second = (batch @ weight).mean(), (batch @ weight).mean()
                assert torch.equal(first, second), 'this device disagrees with itself'
                loss = second
                """
            ),
        ),
    ),
    setup=code(
        """
        import torch

        shared = torch.ones(4, 2)
        weight = torch.ones(2, requires_grad=True)

        def refill(buffer):
            buffer.fill_(float('nan'))  # the loader is in the middle of writing
        """
    ),
    bad=code(
        """
        refill(shared)  # the loader thread, too early
        loss = (shared @ weight).mean()
        """
    ),
    see=(
        "microsoft/dion#76",
        "pytorch/torchtitan#951",
    ),
)

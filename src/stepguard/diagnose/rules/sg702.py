"""SG702: the replay of the bad step is clean."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, code, prose
from stepguard.records import Remedy


def _evidence(case: Case) -> Proof | None:
    if case.origin is None or case.has("compiled_only") or case.phase in ("input", "state", "checkpoint"):
        return None
    if case.origin.reproduced is not False and not case.has("not_reproduced"):
        return None
    first = "the same step, replayed with the same weights, batch, buffers and random numbers, is finite"
    ranks = ", ".join(map(str, case.reading.bad_ranks))
    where = f"it was seen on rank {ranks} only: look at that device first" if ranks else ""
    grads = (
        f"non-finite gradients were seen in {', '.join(case.reading.bad_grads[:3])}" if case.reading.bad_grads else ""
    )
    unsteady = "run again, it gives different bits each time: the step itself is nondeterministic"
    steady = "run again three times, it gives the same bits each time: the fault came from outside"
    again = unsteady if case.has("nondeterministic") else (steady if case.has("transient") else "")
    return Proof(confidence=0.9, evidence=(first, again, case.verdict.summary, grads, where))


RULE = Rule(
    code="SG702",
    title="not reproduced: transient (hardware, race)",
    what=prose(
        """
        The step was bad, its exact replay is not. The numbers were right the second time, so the code and the
        data are probably innocent.
        """
    ),
    why=prose(
        """
        A device returned wrong results (silent data corruption, overheating, a failing board), memory was
        read before an asynchronous copy had finished, another thread changed the batch, a custom kernel races
        or reads uninitialised memory.
        """
    ),
    how=prose(
        """
        The bad step is replayed with weights, batch, buffers and RNG restored. A step that only then is
        finite has no cause that a replay could show. Randomness that is not torch's (numpy, a library's own
        generator) can look the same.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Do not touch the batch after handing it over: keep your own copy of what a worker may overwrite",
            snippet=code(
                """
                batch = shared.clone()
                refill(shared)  # the loader thread
                loss = (batch @ weight).mean()
                """
            ),
        ),
        Remedy(
            title="Repeat a step twice and compare bit by bit; a device that disagrees with itself has to go",
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

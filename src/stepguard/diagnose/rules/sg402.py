"""SG402: the branch that `where` did not take still sends a gradient back."""

from __future__ import annotations

from stepguard.diagnose.case import Case, has_zero
from stepguard.diagnose.rule import CERTAIN, LIKELY, Proof, Rule, code, prose
from stepguard.diagnose.rules.sg204 import PAIR_NODES, SOFTMAX_NODES
from stepguard.diagnose.wording import describe
from stepguard.records import Operand, Remedy

SENTENCE = (
    "the branch was not selected, but its gradient is 0 times the local slope, and 0 * inf "
    "= 0 * NaN = NaN"
)


def _evidence(case: Case) -> Proof | None:
    if case.unselected:
        operands = [describe(o) for o in case.inputs if o.dtype][:2]
        numbers = f"{case.place} computes a branch that `where` discards"
        # the slope of a log-sum over nothing but -inf is NaN whatever gradient comes in
        by_itself = case.node in SOFTMAX_NODES | PAIR_NODES
        confidence = LIKELY if by_itself else CERTAIN
        return Proof(
            confidence=confidence, evidence=(numbers, SENTENCE, *operands, case.confirmed_samples)
        )
    if case.phase != "backward" or not case.loss_finite or case.evidence.absorbed:
        return None
    return _discarded(case)


def _discarded(case: Case) -> Proof | None:
    """NaN can pass a finite loss only by being selected away: no function swallows it."""
    saved = next((o for o in case.inputs if o.nan), None)
    gradient = next((o for o in case.inputs if o is not saved and has_zero(o)), None)
    if saved is None or gradient is None:
        return None
    numbers = (
        f"{case.place} multiplied a gradient of 0 by a value that was NaN in forward "
        f"although the loss is finite"
    )
    return Proof(confidence=0.85, evidence=(numbers, SENTENCE, describe(saved), _zeros(gradient)))


def _zeros(gradient: Operand) -> str:
    return (
        f"{gradient.zeros} elements of the incoming gradient are exactly 0"
        if gradient.zeros
        else ""
    )


RULE = Rule(
    code="SG402",
    title="gradient of an unselected `where` branch",
    what=prose(
        """
        torch.where(condition, f(x), g(x)) computes both branches everywhere. Where f is discarded its
        gradient is 0, and 0 times an infinite or NaN slope is NaN.
        """
    ),
    why=prose(
        """
        `where` reads like an if, so it is used to protect sqrt, log, exp or a division from the values it
        cannot take. It protects the forward pass only. Multiplying by a 0 mask behaves the same.
        """
    ),
    how=prose(
        """
        The loss is finite, the gradient is not, and the node that made NaN got a zero gradient for elements
        whose forward value is discarded by a where, masked_fill or index further on. The condition looks at the
        function's own argument, or the discarded value is infinite at most. A NaN that the forward made for another
        reason (a fully masked row, 0 / 0) and dropped later is reported where it was made, under its own code.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Double where: make the argument harmless first, then select",
            snippet=code(
                """
                safe = torch.where(x > 0, x, 1.0)
                loss = torch.where(x > 0, safe.sqrt(), 0.0).sum()
                """
            ),
        ),
        Remedy(
            title="Compute the function only where it is wanted",
            snippet="loss = x[x > 0].sqrt().sum()",
        ),
        Remedy(
            title="Clamp the argument to where the function is finite, inside the branch",
            snippet="loss = torch.where(x > 0, x.clamp_min(1e-12).sqrt(), 0.0).sum()",
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        x = torch.tensor([4.0, 0.0, -1.0], requires_grad=True)
        """
    ),
    bad="loss = torch.where(x > 0, x.sqrt(), 0.0).sum()",
    see=(
        "pytorch/pytorch#23395",
        "pytorch/pytorch#68425",
        "Ciela-Institute/caustics#83",
    ),
)

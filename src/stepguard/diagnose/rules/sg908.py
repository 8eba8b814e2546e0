"""SG908: a loss that does not depend on what is trained."""

from __future__ import annotations

from collections.abc import Sequence

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.seen import last_looks, trained
from stepguard.records.look import Look

SOLVED = 1e-6
"""Loss, beside that of the first step, that leaves nothing to learn."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    for look in looks:
        rows = trained(look)
        if not rows or any(one.gradient_zeros < 1.0 for one in rows):
            return _part_without(looks)
    if all(look.facts.single_class for look in looks):
        return certain(
            f"the loss of steps {looks[0].step} and {looks[-1].step} takes a softmax over one "
            "class, which is always 1: every gradient is exactly 0"
        )
    return _flat(case, looks)


def _flat(case: Case, looks: Sequence[Look]) -> Proof | None:
    losses = {reading.step: reading.loss for reading in case.recent}
    seen = [losses.get(look.step) for look in looks]
    known = [abs(loss) for loss in seen if loss is not None]
    if known and min(known) <= SOLVED * (case.first_loss or 0.0):
        return None  # converged, or nothing happened: the loss is all there is to lose
    return certain(
        f"every gradient is exactly 0 at steps {looks[0].step} and {looks[-1].step}"
        + (f", with a loss of {seen[-1]:.4g}" if seen[-1] is not None else "")
    )


def _part_without(looks: Sequence[Look]) -> Proof | None:
    """A term that goes up and down with the model, and that the backward pass takes as constant."""
    parts = min(look.facts.parts_without_gradient for look in looks)
    if not parts:
        return None
    terms = "a term" if parts == 1 else f"{parts} terms"
    return likely(
        f"{terms} of the loss of steps {looks[0].step} and {looks[-1].step} comes from the model "
        "and has no gradient (requires_grad=False): nothing is learned from it"
    )


RULE = Rule(code="SG908", recognise=recognise)

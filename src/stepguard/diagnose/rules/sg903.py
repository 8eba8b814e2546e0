"""SG903: parameters that get gradients and no update."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import in_all, last_looks, named, unchanged
from stepguard.records.look import Look

UNCHANGED_LOOKS = 3
"""Looks at which a tensor beside the model must have been the same."""


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    still = unchanged(looks)
    # an optimizer without a guard, or one of copies in float32, may update what looks unowned
    outside = [name for name in in_all(looks, _without_optimizer) if name in still]
    frozen = in_all(looks, _frozen_in_the_optimizer)
    beside = in_all(last_looks(case, UNCHANGED_LOOKS), lambda look: set(look.facts.outsiders))
    if not outside and not frozen and not beside:
        return None
    sentences = []
    if outside:
        sentences.append(
            f"{named(outside)} get gradients in every step and stay as they are: no guarded "
            "optimizer has them"
        )
    if frozen:
        sentences.append(
            f"{named(frozen)} are in the optimizer and have requires_grad=False, beside others of "
            "the same module that train"
        )
    if beside:
        kinds = [looks[-1].facts.outsiders[number] for number in beside]
        sentences.append(
            f"{named(kinds)} takes part in the loss, gets gradients and stays as it is: it belongs "
            "neither to the model nor to an optimizer"
        )
    return likely(*sentences)


def _without_optimizer(look: Look) -> set[str]:
    found = set()
    for one in look.parameters:
        if one.trainable and not one.owned and one.gradient:
            found.add(one.name)
    return found


def _frozen_in_the_optimizer(look: Look) -> set[str]:
    """Whole modules are frozen on purpose; half of one is rather a slip."""
    training = {one.name.rpartition(".")[0] for one in look.parameters if one.gradient}
    found = set()
    for one in look.parameters:
        if one.owned and not one.trainable and one.name.rpartition(".")[0] in training:
            found.add(one.name)
    return found


RULE = Rule(code="SG903", recognise=recognise)

"""SG903: parameters that get gradients and no update."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import in_all, last_looks, named, unchanged
from stepguard.records.look import Look


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    still = unchanged(looks)
    # an optimizer without a guard, or one of copies in float32, may update what looks unowned
    outside = [name for name in in_all(looks, _without_optimizer) if name in still]
    frozen = in_all(looks, _frozen_in_the_optimizer)
    if not outside and not frozen:
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

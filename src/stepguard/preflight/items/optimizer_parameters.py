"""`optimizer.parameters`: the optimizer holds the model's parameters, all that are to be trained."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, count, failed, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.tensors.names import optimizer_parameter_ids


def _look(seen: Inspection) -> Seen:
    named = dict(seen.model.named_parameters())
    if not named:
        raise Pointless("the model has no parameters")
    held = optimizer_parameter_ids(seen.optimizer)
    own = {id(p) for p in named.values()}
    if not held & own:
        return failed(
            f"none of the model's {count(len(named), 'parameter')} is in the optimizer "
            f"({len(held)} others are)",
            fix="Build the optimizer from this model, after it was moved, wrapped or replaced.",
        )
    left_out = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out:
        return warned(
            f"{count(len(left_out), 'trainable parameter')} not in the optimizer: {some(left_out)}",
            fix="Add them to a group, or set requires_grad=False so that the intent is visible.",
        )
    frozen = sum(not p.requires_grad for p in named.values())
    return passed(
        f"{len(named) - frozen} trainable parameters are in the optimizer, {frozen} are frozen"
    )


ITEM = Item(
    id="optimizer.parameters", title="the optimizer holds the model's parameters", look=_look
)

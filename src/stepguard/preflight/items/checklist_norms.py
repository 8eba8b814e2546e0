"""`checklist.norms`: somebody records gradient norms while training."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.checklist_loss_checked import guarded_at

NAMES = ("clip_grad_norm_", "get_total_norm", "grad_norm", "total_norm", "vector_norm")


def _look(seen: Inspection) -> Seen:
    place = guarded_at(seen)
    if place:
        return passed(f"stepguard records the norm of every step ({place})")
    mentions = seen.project.mentions
    found = [f"{name} at {mentions[name]}" for name in NAMES if name in mentions]
    if found:
        return passed(found[0])
    return warned(
        f"no gradient norm is computed in {seen.project.files} source files",
        fix="guard = stepguard.watch(model, optimizer) records it; clip_grad_norm_ returns it.",
    )


ITEM = Item(id="checklist.norms", title="gradient norms are monitored", look=_look)

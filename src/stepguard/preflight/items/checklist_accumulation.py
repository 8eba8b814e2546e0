"""`checklist.accumulation`: how many micro-batches make a step, and that the setting is used."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.tracking import unread

USUAL = (2, 4)


def _look(seen: Inspection) -> Seen:
    setting, steps = seen.setting("accumulation"), seen.number("accumulation")
    real = seen.around.facts.get("gradient_accumulation_steps")
    if steps is None and not isinstance(real, int):
        raise Pointless("no accumulation is configured: one batch is one step")
    if setting is not None and _nowhere(seen, setting.key) and not isinstance(real, int):
        return warned(f"{setting} is read by nothing", fix="Use it in the loop, or remove it.")
    value = int(steps if steps is not None else real or 1)
    size = seen.number("batch_size")
    batch = (
        f", effective batch {value * int(size)} = {value} x {int(size)} on each rank"
        if size
        else ""
    )
    if value == 1:
        raise Pointless(f"accumulation is 1{batch}")
    inside = "within" if USUAL[0] <= value <= USUAL[1] else "outside"
    return passed(
        f"{value} micro-batches a step, {inside} the usual 2 to 4{batch}; it enlarges the batch, "
        f"not memory"
    )


def _nowhere(seen: Inspection, key: str) -> bool:
    tracked = seen.place.tracked
    return (
        tracked is not None
        and key in unread(tracked)
        and key.rpartition(".")[2] not in seen.project.mentions
    )


ITEM = Item(
    id="checklist.accumulation", title="gradient accumulation (2 to 4) is in effect", look=_look
)

"""`labels.range`: targets are classes the loss knows."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Pointless, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.labels_empty import labels_of


def _look(seen: Inspection) -> Seen:
    labels = labels_of(seen)
    if labels.low is None or labels.high is None:
        raise Pointless("no target counts")
    (low, low_name), (high, high_name) = labels.low, labels.high
    spans = f"targets span {low} to {high}"
    fix = "Correct the labels, the number of classes, or the ignore_index."
    if low < 0:
        return failed(
            f"{spans}: {low} in example {low_name} is no class and not the ignore_index", fix=fix
        )
    try:
        classes = seen.live.classes
    except Missing:
        classes = None
    if classes is None:
        return passed(f"{spans}; the number of classes was not seen in a cross-entropy")
    if high >= classes:
        return failed(
            f"{spans}, but the loss has {classes} classes: {high} in example {high_name}", fix=fix
        )
    return passed(f"{spans}, the loss has {classes} classes")


ITEM = Item(id="labels.range", title="targets are classes of the loss", look=_look)

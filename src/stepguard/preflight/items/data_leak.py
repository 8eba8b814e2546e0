"""`data.leak`: no example is in both training and validation data."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, count, failed, passed, some
from stepguard.preflight.data.facts import overlap
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    validation = seen.validation
    shared = overlap(seen.data, validation)
    if shared.number:
        return failed(
            f"{count(shared.number, 'example')} of {validation.seen:,} in the validation data are "
            f"training examples: "
            f"{some(shared.names)}",
            fix="Split before augmenting, by source and not by row.",
        )
    return passed(
        f"none of {validation.seen:,} validation examples is among {seen.data.seen:,} training "
        f"examples"
    )


ITEM = Item(id="data.leak", title="training and validation data are disjoint", look=_look)

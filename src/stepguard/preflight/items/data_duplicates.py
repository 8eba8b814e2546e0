"""`data.duplicates`: no example is there twice."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, count, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    data = seen.data
    if not data.duplicates.number:
        return passed(f"{data.scope}, all different")
    share = 100 * data.duplicates.number / data.seen
    return warned(
        f"{count(data.duplicates.number, 'repeated example')} ({share:.3g} %): "
        f"{some(data.duplicates.names)}",
        fix="Remove the repetitions, or weight them on purpose.",
    )


ITEM = Item(id="data.duplicates", title="no example is repeated", look=_look)

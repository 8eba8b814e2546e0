"""`data.unreadable`: every example can be read."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, count, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    data = seen.data
    if data.unreadable.number:
        return failed(
            f"{count(data.unreadable.number, 'example')} of {data.seen:,}: "
            f"{some(data.unreadable.names, 3)}",
            fix="Restore these files, or leave them out: the run dies when it comes to them.",
        )
    if not data.seen:
        return failed(
            f"the {data.what} gave no example", fix="Give a dataset or path that holds some."
        )
    return passed(f"{data.scope} can be read", *data.remarks)


ITEM = Item(id="data.unreadable", title="every example can be read", look=_look)

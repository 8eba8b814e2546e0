"""`data.missing`: empty cells in columns of numbers."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    columns = seen.data.columns
    if not any(column.numbers for column in columns.values()):
        raise Pointless("the data has no columns of numbers")
    gaps = [
        f"{key}: {column.missing.number} of {column.missing.number + column.numbers} "
        f"({some(column.missing.names, 3)})"
        for key, column in columns.items()
        if column.missing.number and column.numbers
    ]
    if gaps:
        return warned(
            f"empty values in {some(gaps)}",
            fix="Fill them or leave these examples out, and say which.",
        )
    return passed(f"no empty value in {seen.data.scope}")


ITEM = Item(id="data.missing", title="no value is missing", look=_look)

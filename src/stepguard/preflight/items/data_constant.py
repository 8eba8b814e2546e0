"""`data.constant`: inputs that carry no information: one value everywhere."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, count, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

LEAST_EXAMPLES = 8


def _look(seen: Inspection) -> Seen:
    data = seen.data
    columns = [
        f"{key} = {column.low:g}"
        for key, column in data.columns.items()
        if column.scalar
        and not column.whole
        and column.numbers >= LEAST_EXAMPLES
        and column.low == column.high
    ]
    said = []
    if data.constant.number:
        said.append(
            f"{count(data.constant.number, 'input')} in {data.scope}: {some(data.constant.names)}"
        )
    if columns:
        said.append(f"the same value in every example: {some(columns)}")
    if said:
        return warned(
            *said,
            fix="Look at these files: a failed recording or conversion. A constant has no "
            "variance.",
        )
    return passed(f"no constant input in {data.scope}")


ITEM = Item(id="data.constant", title="inputs vary", look=_look)

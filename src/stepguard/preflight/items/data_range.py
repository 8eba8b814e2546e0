"""`data.range`: values lie where they are expected, and inside the dtype the step runs in."""

from __future__ import annotations

from statistics import median

from stepguard.diagnose.dtypes import largest
from stepguard.preflight.answers import Missing, Pointless, Seen, failed, passed, some, warned
from stepguard.preflight.data.facts import Column
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

OUTLIER = 1000.0
"""Times the median example."""
LEAST_EXAMPLES = 8


def _look(seen: Inspection) -> Seen:
    columns = {key: column for key, column in seen.data.columns.items() if column.largest}
    if not columns:
        raise Pointless("the data has no real numbers")
    outside = _outside(seen)
    if outside:
        return failed(
            *outside, fix="Correct the scaling of these examples, or the range that is declared."
        )
    too_large = _beyond_dtype(seen, columns)
    if too_large:
        return failed(*too_large, fix="Scale the inputs, or run in bfloat16 or float32.")
    outliers = [sentence for key, column in columns.items() for sentence in _outliers(key, column)]
    if outliers:
        return warned(*outliers[:4], fix="Look at these examples: a wrong unit or a corrupt value.")
    spans = [
        f"{key or 'values'} {column.low:.3g} to {column.high:.3g}"
        for key, column in columns.items()
    ]
    return passed(some(spans))


def _outside(seen: Inspection) -> list[str]:
    said = []
    for key, (low, high) in seen.subject.data_range.items():
        column = seen.data.columns.get(key)
        if column is None:
            said.append(f"data_range names {key!r}, which no example has")
        elif column.numbers and (column.low < low or column.high > high):
            worst = max(column.largest, default=(0.0, "unknown"))
            said.append(
                f"{key} spans {column.low:.4g} to {column.high:.4g}, allowed is {low:g} to "
                f"{high:g}; "
                f"largest in {worst[1]}"
            )
    return said


def _beyond_dtype(seen: Inspection, columns: dict[str, Column]) -> list[str]:
    try:
        dtype = seen.probe.dtype
    except Missing:
        return []
    said = []
    for key, column in columns.items():
        value, name = max(column.largest)
        if value > largest(dtype):
            said.append(
                f"{key or 'value'} {value:.4g} in {name} is infinite in {dtype}, which the step "
                f"runs in"
            )
    return said


def _outliers(key: str, column: Column) -> list[str]:
    if len(column.largest) < LEAST_EXAMPLES:
        return []
    usual = median(value for value, _ in column.largest)
    far = sorted(
        (pair for pair in column.largest if usual > 0 and pair[0] > OUTLIER * usual), reverse=True
    )
    if not far:
        return []
    names = some([f"{name} ({value:.4g})" for value, name in far], 3)
    beyond = f"{len(far)} of {len(column.largest)} beyond {OUTLIER:g} x {usual:.3g}, the usual"
    return [f"{key or 'values'}: {beyond}: {names}"]


ITEM = Item(id="data.range", title="values lie where they are expected", look=_look)

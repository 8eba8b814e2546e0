"""The data: values that are bad, missing, constant or far off; examples that fail or repeat."""

from __future__ import annotations

from statistics import median

from stepguard.diagnose.case import largest
from stepguard.preflight.data import Column, overlap
from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import Answer, NotApplicable, NotGiven, failed, passed, warned
from stepguard.report.phrases import count, first_few

OUTLIER = 1000.0
"""Times the median example."""
RARE = 0.1
"""Of the examples."""
LEAST_EXAMPLES = 8
"""With fewer examples neither a constant column nor an outlier says anything."""


@item("data.finite", "inputs are finite")
def finite(run: Inspection) -> Answer:
    data = run.data
    if not data.nonfinite.number:
        return passed(f"no NaN and no Inf in {data.scope}", *data.remarks)
    return failed(
        f"{count(data.nonfinite.number, 'place')} in {data.scope}: "
        f"{first_few(data.nonfinite.names, 4)}",
        fix="Repair or leave out these examples; clean before the model, never after (0 * NaN is "
        "NaN).",
    )


@item("data.missing", "no value is missing")
def missing(run: Inspection) -> Answer:
    numeric = False
    gaps = []
    for key, column in run.data.columns.items():
        empty = column.missing
        # A column of texts may be empty by right.
        if column.numbers:
            numeric = True
            total = empty.number + column.numbers
            if empty.number:
                gaps.append(f"{key}: {empty.number} of {total} ({first_few(empty.names, 3)})")
    if not numeric:
        raise NotApplicable("the data has no columns of numbers")
    if gaps:
        return warned(
            f"empty values in {first_few(gaps, 4)}",
            fix="Fill them or leave these examples out, and say which.",
        )
    return passed(f"no empty value in {run.data.scope}")


@item("data.constant", "inputs vary")
def constant(run: Inspection) -> Answer:
    data = run.data
    said = []
    number = data.constant.number
    names = list(data.constant.names)
    columns = []
    for key, column in data.columns.items():
        # Masks are 0 or 1 throughout by right, and so are types of tokens and class maps: only a
        # row that is unlike nearly all others is one that went wrong.
        if column.high - column.low > 1 and column.flat.number <= RARE * column.numbers:
            number += column.flat.number
            names += column.flat.names
        # Whole numbers are ids or classes, which may all be the same.
        measured = column.scalar and not column.whole and column.numbers >= LEAST_EXAMPLES
        if measured and column.low == column.high:
            columns.append(f"{key} = {column.low:g}")
    if number:
        said.append(f"{count(number, 'input')} in {data.scope}: {first_few(names, 4)}")
    if columns:
        said.append(f"the same value in every example: {first_few(columns, 4)}")
    if not said:
        return passed(f"no constant input in {data.scope}")
    return warned(
        *said,
        fix="Look at these files: a failed recording or conversion. A constant has no variance.",
    )


@item("data.range", "values lie where they are expected")
def value_range(run: Inspection) -> Answer:
    columns = {key: column for key, column in run.data.columns.items() if column.largest}
    if not columns:
        raise NotApplicable("the data has no real numbers")
    outside = _outside_declared_range(run)
    if outside:
        return failed(
            *outside, fix="Correct the scaling of these examples, or the range that is declared."
        )
    too_large = _beyond_dtype(run, columns)
    if too_large:
        return failed(*too_large, fix="Scale the inputs, or run in bfloat16 or float32.")
    outliers = []
    spans = []
    for key, column in columns.items():
        name = key or "values"
        outliers += _outliers(name, column)
        spans.append(f"{name} {column.low:.3g} to {column.high:.3g}")
    if outliers:
        return warned(*outliers[:4], fix="Look at these examples: a wrong unit or a corrupt value.")
    return passed(first_few(spans, 4))


def _outside_declared_range(run: Inspection) -> list[str]:
    said = []
    for key, (low, high) in run.subject.data_range.items():
        column = run.data.columns.get(key)
        if column is None:
            said.append(f"data_range names {key!r}, which no example has")
        elif column.numbers and (column.low < low or column.high > high):
            _, name = max(column.largest, default=(0.0, "unknown"))
            said.append(
                f"{key} spans {column.low:.4g} to {column.high:.4g}, allowed is {low:g} to "
                f"{high:g}; largest in {name}"
            )
    return said


def _beyond_dtype(run: Inspection, columns: dict[str, Column]) -> list[str]:
    try:
        dtype = run.probe.dtype
    except NotGiven:
        return []
    said = []
    for key, column in columns.items():
        value, name = max(column.largest)
        if value > largest(dtype):
            said.append(
                f"{key or 'value'} {value:.4g} in {name} is infinite in {dtype}, which the step "
                "runs in"
            )
    return said


def _outliers(name: str, column: Column) -> list[str]:
    if len(column.largest) < LEAST_EXAMPLES:
        return []
    usual = median(value for value, _ in column.largest)
    # If most examples are all 0, any other is infinitely far from the median.
    if usual <= 0:
        return []
    far = []
    for value, example in sorted(column.largest, reverse=True):
        if value > OUTLIER * usual:
            far.append(f"{example} ({value:.4g})")
    if not far:
        return []
    beyond = f"{len(far)} of {len(column.largest)} beyond {OUTLIER:g} x {usual:.3g}, the usual"
    return [f"{name}: {beyond}: {first_few(far, 3)}"]


@item("data.unreadable", "every example can be read")
def unreadable(run: Inspection) -> Answer:
    data = run.data
    if data.unreadable.number:
        return failed(
            f"{count(data.unreadable.number, 'example')} of {data.seen:,}: "
            f"{first_few(data.unreadable.names, 3)}",
            fix="Restore these files, or leave them out: the run dies when it comes to them.",
        )
    if not data.seen:
        return failed(
            f"the {data.what} gave no example", fix="Give a dataset or path that holds some."
        )
    return passed(f"{data.scope} can be read", *data.remarks)


@item("data.duplicates", "no example is repeated")
def duplicates(run: Inspection) -> Answer:
    data = run.data
    if not data.duplicates.number:
        return passed(f"{data.scope}, all different")
    share = 100 * data.duplicates.number / data.seen
    return warned(
        f"{count(data.duplicates.number, 'repeated example')} ({share:.3g} %): "
        f"{first_few(data.duplicates.names, 4)}",
        fix="Remove the repetitions, or weight them on purpose.",
    )


@item("data.leak", "training and validation data are disjoint")
def leak(run: Inspection) -> Answer:
    validation = run.validation
    shared = overlap(run.data, validation)
    if not shared.number:
        return passed(
            f"none of {validation.seen:,} validation examples is among {run.data.seen:,} training "
            "examples"
        )
    return failed(
        f"{count(shared.number, 'example')} of {validation.seen:,} in the validation data are "
        f"training examples: {first_few(shared.names, 4)}",
        fix="Split before augmenting, by source and not by row.",
    )

"""Items about data: bad, missing, constant or far-off values, repeated examples, and targets."""

from __future__ import annotations

import math
from contextlib import suppress
from statistics import median

from stepguard.check.data import LabelFacts, Measured, in_example, overlap
from stepguard.check.inspection import (
    Answer,
    Inspection,
    NotApplicable,
    NotGiven,
    failed,
    passed,
    warned,
)
from stepguard.diagnose.case import largest
from stepguard.report.phrases import count, first_few

OUTLIER = 1000.0
"""Times the median example."""
RARE = 0.1
"""Of the examples."""
LEAST_EXAMPLES = 8
"""With fewer examples neither a constant column nor an outlier says anything."""
LEAST_ELEMENTS = {"real": 16, "ids": 8}
"""A tensor with fewer may be constant by chance."""


def data_finite(run: Inspection) -> Answer:
    data = run.data
    if not data.nonfinite:
        return passed(f"no NaN and no Inf in {data.scope}", *data.remarks)
    return failed(
        f"{count(len(data.nonfinite), 'place')} in {data.scope}: {first_few(data.nonfinite, 4)}",
        fix="Repair or leave out these examples; clean before the model, never after (0 * NaN is "
        "NaN).",
    )


def data_missing(run: Inspection) -> Answer:
    data = run.data
    if not data.numbers:
        raise NotApplicable("the data has no columns of numbers")
    gaps = []
    for key, names in data.missing.items():
        # A column of texts may be empty by right.
        if data.numbers[key]:
            total = len(names) + data.numbers[key]
            gaps.append(f"{key}: {len(names)} of {total} ({first_few(names, 3)})")
    if gaps:
        return warned(
            f"empty values in {first_few(gaps, 4)}",
            fix="Fill them or leave these examples out, and say which.",
        )
    return passed(f"no empty value in {data.scope}")


def data_constant(run: Inspection) -> Answer:
    data = run.data
    said = []
    names = []
    columns = []
    for key, values in data.values.items():
        low, high = _span(values)
        places: dict[str, list[str]] = {"real": [], "ids": []}
        for name, least, most, size, kind in values:
            # The chance that whole numbers agree is smaller.
            if least == most and size >= LEAST_ELEMENTS.get(kind, math.inf):
                place = in_example(name, key)
                places[kind].append(f"{place} = {least:g} in all {size:,} places")
        names += places["real"]
        # Masks are 0 or 1 throughout by right, and so are types of tokens and class maps: only a
        # row that is unlike nearly all others is one that went wrong.
        if high - low > 1 and len(places["ids"]) <= RARE * len(values):
            names += places["ids"]
        # Whole numbers are ids or classes, which may all be the same.
        measured = values[0].kind == "real" and values[0].size == 1 and not low.is_integer()
        if measured and low == high and len(values) >= LEAST_EXAMPLES:
            columns.append(f"{key} = {low:g}")
    if names:
        said.append(f"{count(len(names), 'input')} in {data.scope}: {first_few(names, 4)}")
    if columns:
        said.append(f"the same value in every example: {first_few(columns, 4)}")
    if not said:
        return passed(f"no constant input in {data.scope}")
    return warned(
        *said,
        fix="Look at these files: a failed recording or conversion. A constant has no variance.",
    )


def _span(values: list[Measured]) -> tuple[float, float]:
    return min(value.low for value in values), max(value.high for value in values)


def _magnitudes(values: list[Measured]) -> list[tuple[float, str]]:
    """Largest magnitude of each example with real numbers, the largest first."""
    real = [value for value in values if value.kind == "real"]
    return sorted(((max(-v.low, v.high), v.example) for v in real), reverse=True)


def data_range(run: Inspection) -> Answer:
    values = run.data.values
    outside = []
    for key, (low, high) in run.subject.data_range.items():
        if not values[key]:
            outside.append(f"data_range names {key!r}, which no example has")
            continue
        least, most = _span(values[key])
        if least < low or most > high:
            said = f"{key} spans {least:.4g} to {most:.4g}, allowed is {low:g} to {high:g}"
            outside.append(f"{said}; largest in {_magnitudes(values[key])[0][1]}")
    if outside:
        return failed(
            *outside, fix="Correct the scaling of these examples, or the range that is declared."
        )
    dtype = "float64"
    with suppress(NotGiven):
        dtype = run.probe.dtype
    too_large = []
    outliers = []
    spans = []
    for key, found in values.items():
        sizes = _magnitudes(found)
        if not sizes:
            continue
        name = key or "values"
        largest_size, example = sizes[0]
        if largest_size > largest(dtype):
            said = f"{name} {largest_size:.4g} in {example} is infinite in {dtype}"
            too_large.append(f"{said}, which the step runs in")
        outliers += _outliers(name, sizes)
        low, high = _span(found)
        spans.append(f"{name} {low:.3g} to {high:.3g}")
    if not spans:
        raise NotApplicable("the data has no real numbers")
    if too_large:
        return failed(*too_large, fix="Scale the inputs, or run in bfloat16 or float32.")
    if outliers:
        return warned(*outliers[:4], fix="Look at these examples: a wrong unit or a corrupt value.")
    return passed(first_few(spans, 4))


def _outliers(name: str, sizes: list[tuple[float, str]]) -> list[str]:
    usual = median(size for size, _ in sizes)
    far = [f"{example} ({size:.4g})" for size, example in sizes if size > OUTLIER * usual]
    # If most examples are all 0, any other is infinitely far from the median.
    if not far or not usual or len(sizes) < LEAST_EXAMPLES:
        return []
    beyond = f"{len(far)} of {len(sizes)} beyond {OUTLIER:g} x {usual:.3g}, the usual"
    return [f"{name}: {beyond}: {first_few(far, 3)}"]


def data_unreadable(run: Inspection) -> Answer:
    data = run.data
    if data.unreadable:
        return failed(
            f"{count(len(data.unreadable), 'example')} of {data.seen:,}: "
            f"{first_few(data.unreadable, 3)}",
            fix="Restore these files, or leave them out: the run dies when it comes to them.",
        )
    if not data.seen:
        return failed(
            f"the {data.what} gave no example", fix="Give a dataset or path that holds some."
        )
    return passed(f"{data.scope} can be read", *data.remarks)


def data_duplicates(run: Inspection) -> Answer:
    repeated = run.data.duplicates
    if not repeated:
        return passed(f"{run.data.scope}, all different")
    share = 100 * len(repeated) / run.data.seen
    return warned(
        f"{count(len(repeated), 'repeated example')} ({share:.3g} %): {first_few(repeated, 4)}",
        fix="Remove the repetitions, or weight them on purpose.",
    )


def data_leak(run: Inspection) -> Answer:
    validation = run.validation
    shared = overlap(run.data, validation)
    if not shared:
        return passed(
            f"none of {validation.seen:,} validation examples is among {run.data.seen:,} training "
            "examples"
        )
    return failed(
        f"{count(len(shared), 'example')} of {validation.seen:,} in the validation data are "
        f"training examples: {first_few(shared, 4)}",
        fix="Split before augmenting, by source and not by row.",
    )


# --- Targets.


def _labels(run: Inspection) -> LabelFacts:
    """Statistics of the targets, for data that has integer targets."""
    if run.data.labels.lengths:
        return run.data.labels
    usual = "key labels, label, target or y, nor in the last part of a tuple"
    key = f"key {run.subject.label_key!r}" if run.subject.label_key else usual
    raise NotApplicable(f"no integer targets under the {key}; --label-key names another")


def labels_empty(run: Inspection) -> Answer:
    labels = _labels(run)
    share = f"{labels.supervised:,} of {labels.total:,} targets count"
    if not labels.empty:
        return passed(f"each of {run.data.scope} has a target that counts; {share}")
    evidence = [
        f"{count(len(labels.empty), 'example')} of {len(labels.lengths):,} without a target other "
        f"than {labels.ignore_index}: {first_few(labels.empty)}"
    ]
    longest = max(labels.lengths)
    full = list(labels.empty.values()).count(longest)
    if full and min(labels.lengths) != longest:
        evidence.append(
            f"{full} of them fill the whole length of {longest}: the prompt alone was too long"
        )
    return failed(
        *evidence,
        share,
        fix="Leave these examples out before batching, or cut the prompt and keep the answer "
        "(truncation_side='left'); see `stepguard explain SG102`.",
    )


def labels_range(run: Inspection) -> Answer:
    labels = _labels(run)
    if not labels.supervised:
        raise NotApplicable("no target counts")
    (low, low_name), (high, high_name) = labels.low, labels.high
    spans = f"targets span {low} to {high}"
    fix = "Correct the labels, the number of classes, or the ignore_index."
    if low < 0:
        return failed(
            f"{spans}: {low} in example {low_name} is not a class and not the ignore_index", fix=fix
        )
    classes = None
    with suppress(NotGiven):
        classes = run.traced_step.classes
    if classes is None:
        return passed(f"{spans}; the number of classes was not seen in a cross-entropy")
    if high >= classes:
        return failed(
            f"{spans}, but the loss has {classes} classes: {high} in example {high_name}", fix=fix
        )
    return passed(f"{spans}, the loss has {classes} classes")


def _end_token(run: Inspection) -> int | None:
    """From the configuration, else from the model, where transformers keeps it."""
    found = run.number("eos")
    if found is None:
        found = getattr(getattr(run.subject.model, "config", None), "eos_token_id", None)
    # transformers may keep a list of several.
    return int(found) if isinstance(found, int | float) else None


def labels_truncated(run: Inspection) -> Answer:
    labels = _labels(run)
    shortest, longest = min(labels.lengths), max(labels.lengths)
    configured = run.number("max_length")
    if labels.total == len(labels.lengths):
        raise NotApplicable("the targets are single classes, not sequences")
    if not labels.masked:
        raise NotApplicable("every token counts: packed text has no end that could be cut off")
    if configured is None and shortest == longest:
        raise NotApplicable(
            f"all examples are {longest} long, and no max_length is configured to compare with"
        )
    end = _end_token(run)
    limit = int(configured or longest)
    cut = [name for name, length, last in labels.cuts if length >= limit and last != end]
    lengths = f"lengths {shortest} to {longest}, limit {limit}"
    if configured is None and end is None:
        lengths += (
            " (the longest; name max_length and eos_token_id in the configuration to be exact)"
        )
        # One example is always the longest.
        if len(cut) == 1:
            cut = []
    if not cut:
        return passed(f"no answer ends at the limit; {lengths}")
    how = "to the last token" if end is None else f"without the end token {end}"
    return warned(
        f"{count(len(cut), 'answer')} of {len(labels.lengths):,} run into the limit {how}: "
        f"{first_few(cut)}",
        lengths,
        fix="Raise the maximal length, or leave out what is longer: a cut answer teaches to stop "
        "nowhere.",
    )

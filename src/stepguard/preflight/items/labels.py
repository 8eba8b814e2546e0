"""Targets: examples without one, classes the loss does not have, answers that were cut off."""

from __future__ import annotations

from stepguard.preflight.data import LabelFacts
from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import Answer, NotApplicable, NotGiven, failed, passed, warned
from stepguard.report.phrases import count, first_few


def _labels(run: Inspection) -> LabelFacts:
    """Statistics of the targets, for data that has integer targets."""
    labels = run.data.labels
    if labels.examples:
        return labels
    wanted = "key labels, label, target or y, nor in the last part of a tuple"
    if run.subject.label_key:
        wanted = f"key {run.subject.label_key!r}"
    raise NotApplicable(f"no integer targets under the {wanted}; --label-key names another")


@item("labels.empty", "every example has a target that counts")
def empty(run: Inspection) -> Answer:
    labels = _labels(run)
    share = f"{labels.supervised:,} of {labels.total:,} targets count"
    if not labels.empty:
        return passed(f"each of {run.data.scope} has a target that counts; {share}")
    evidence = [
        f"{count(len(labels.empty), 'example')} of {labels.examples:,} without a target other than "
        f"{labels.ignore_index}: {first_few(labels.empty)}"
    ]
    full = labels.empty_lengths.count(labels.longest)
    if full and labels.shortest != labels.longest:
        evidence.append(
            f"{full} of them fill the whole length of {labels.longest}: the prompt alone was too "
            "long"
        )
    return failed(
        *evidence,
        share,
        fix="Leave these examples out before batching, or cut the prompt and keep the answer "
        "(truncation_side='left'); see `stepguard explain SG102`.",
    )


@item("labels.range", "targets are classes of the loss")
def class_range(run: Inspection) -> Answer:
    labels = _labels(run)
    if labels.low is None or labels.high is None:
        raise NotApplicable("no target counts")
    low, low_name = labels.low
    high, high_name = labels.high
    spans = f"targets span {low} to {high}"
    fix = "Correct the labels, the number of classes, or the ignore_index."
    if low < 0:
        return failed(
            f"{spans}: {low} in example {low_name} is no class and not the ignore_index", fix=fix
        )
    try:
        classes = run.traced_step.classes
    except NotGiven:
        classes = None
    if classes is None:
        return passed(f"{spans}; the number of classes was not seen in a cross-entropy")
    if high >= classes:
        return failed(
            f"{spans}, but the loss has {classes} classes: {high} in example {high_name}", fix=fix
        )
    return passed(f"{spans}, the loss has {classes} classes")


@item("labels.truncated", "answers are not cut off")
def truncated(run: Inspection) -> Answer:
    labels = _labels(run)
    configured = run.number("max_length")
    _has_ends(labels, configured)
    end_token = _end_token(run)
    limit = int(configured or labels.longest)
    cut = _cut_off(labels, limit, end_token)
    lengths = f"lengths {labels.shortest} to {labels.longest}, limit {limit}"
    if configured is None and end_token is None:
        lengths += (
            " (the longest; name max_length and eos_token_id in the configuration to be exact)"
        )
        # One example is always the longest.
        if len(cut) == 1:
            cut = []
    if not cut:
        return passed(f"no answer ends at the limit; {lengths}")
    how = "to the last token"
    if end_token is not None:
        how = f"without the end token {end_token}"
    return warned(
        f"{count(len(cut), 'answer')} of {labels.examples:,} run into the limit {how}: "
        f"{first_few(cut)}",
        lengths,
        fix="Raise the maximal length, or leave out what is longer: a cut answer teaches to stop "
        "nowhere.",
    )


def _has_ends(labels: LabelFacts, limit: float | None) -> None:
    """Raise NotApplicable for targets whose end says nothing."""
    if labels.total == labels.examples:
        raise NotApplicable("the targets are single classes, not sequences")
    if not labels.masked:
        raise NotApplicable("every token counts: packed text has no end that could be cut off")
    if limit is None and labels.shortest == labels.longest:
        raise NotApplicable(
            f"all examples are {labels.longest} long, and no max_length is configured to compare "
            "with"
        )


def _cut_off(labels: LabelFacts, limit: int, end_token: int | None) -> list[str]:
    """Names of the examples that reach the limit and do not end with the end token."""
    names = []
    for end in labels.cuts:
        ended = end_token is not None and end.last_token == end_token
        if end.length >= limit and not ended:
            names.append(end.name)
    return names


def _end_token(run: Inspection) -> int | None:
    """From the configuration, else from the model's own (transformers keeps it there)."""
    configured = run.number("eos")
    if configured is not None:
        return int(configured)
    own = getattr(getattr(run.subject.model, "config", None), "eos_token_id", None)
    if isinstance(own, int):
        return own
    return None

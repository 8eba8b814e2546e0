"""`labels.empty`: examples all of whose targets are ignored: their mean loss is 0 / 0."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, count, failed, passed, some
from stepguard.preflight.data.labels import LabelFacts
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def labels_of(seen: Inspection) -> LabelFacts:
    """The statistics, for data that has integer targets."""
    labels = seen.data.labels
    if not labels.examples:
        wanted = (
            f"key {seen.subject.label_key!r}"
            if seen.subject.label_key
            else "key labels, label, target or y"
        )
        raise Pointless(f"no integer targets under the {wanted}; --label-key names another")
    return labels


def _look(seen: Inspection) -> Seen:
    labels = labels_of(seen)
    share = f"{labels.supervised:,} of {labels.total:,} targets count"
    if not labels.empty:
        return passed(f"each of {seen.data.scope} has a target that counts; {share}")
    evidence = [
        f"{count(len(labels.empty), 'example')} of {labels.examples:,} without a target other than "
        f"{labels.ignore_index}: {some(labels.empty, 8)}"
    ]
    full = sum(length == labels.longest for length in labels.empty_lengths)
    if full and labels.shortest != labels.longest:
        evidence.append(
            f"{full} of them fill the whole length of {labels.longest}: the prompt alone was too "
            f"long"
        )
    return failed(
        *evidence,
        share,
        fix="Leave these examples out before batching, or cut the prompt and keep the answer "
        "(truncation_side='left'); "
        "see `stepguard explain SG102`.",
    )


ITEM = Item(id="labels.empty", title="every example has a target that counts", look=_look)

"""SG204: a softmax over a row in which everything is masked."""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import SOFTMAXES, words
from stepguard.diagnose.rule import Proof, Rule, certain
from stepguard.diagnose.wording import at_index, describe
from stepguard.records import Operand

SOFTMAX_NODES = words("Softmax LogSoftmax Logsumexp SafeSoftmax Logcumsumexp")
PAIR_NODES = words("Logaddexp Logaddexp2")
MASKS = ("attn_bias", "attn_mask", "mask", "bias")


def recognise(case: Case) -> Proof | None:
    if case.op in SOFTMAXES or case.node in SOFTMAX_NODES:
        return _softmax(case)
    if case.node in PAIR_NODES:
        return _pair(case)
    return _row_maximum(case)


def _softmax(case: Case) -> Proof | None:
    scores = _masked(case)
    if case.evidence.masked_rows is None and not _could_be_a_row(scores):
        return None
    return certain(_rows(case, scores), describe(scores), case.confirmed_samples)


def _masked(case: Case) -> Operand | None:
    closed = [operand for operand in case.inputs if operand.neginf]
    named = [operand for operand in closed if operand.name in MASKS]
    return next(iter(named + closed), None)


def _could_be_a_row(scores: Operand | None) -> bool:
    """Are there enough -inf to fill a row, and nothing else that breaks a softmax?"""
    if scores is None or scores.posinf:
        return False
    # which axis was normalised is not known here, so the shortest one is taken as the row
    return scores.neginf >= min(scores.shape, default=1)


def _rows(case: Case, scores: Operand | None) -> str:
    rows = case.evidence.masked_rows
    how_many = "a row"
    if rows is not None:
        how_many = "1 row" if rows == 1 else f"{rows} rows"
        if scores is not None:
            how_many += f" of {case.evidence.rows or math.prod(scores.shape[:-1])}"
    where = ""
    if case.output is not None:
        where = at_index(case.output)
    return (
        f"{case.place}: {how_many} with every entry -inf{where}; exp(-inf) sums to 0 and "
        f"0 / 0 is NaN"
    )


def _pair(case: Case) -> Proof | None:
    """log(exp(a) + exp(b)) with both -inf is -inf, rightly; its slope is exp(-inf - -inf)."""
    both = [operand for operand in case.inputs if operand.neginf]
    if len(both) < 2 or not case.makes_nan:
        return None
    text = (
        f"{case.place}: both terms of a log-sum are -inf{at_index(both[0])}: its value is -inf, "
        f"its slope is 0 / 0"
    )
    return certain(text, *map(describe, both), case.confirmed_samples)


def _row_maximum(case: Case) -> Proof | None:
    """A hand-written softmax: the row's maximum, itself -inf, is subtracted from the row."""
    scores = case.argument("self", 0)
    top = case.argument("other", 1)
    if case.op != "sub" or scores is None or top is None or not case.makes_nan:
        return None
    if not scores.neginf or not top.neginf:
        return None
    if case.evidence.masked_rows is None and not _is_reduced(top, scores):
        return None
    text = (
        f"{case.place}: {top.neginf} row maxima are -inf, so every entry of those rows is "
        f"masked and -inf - -inf is NaN"
    )
    return certain(text, describe(scores), case.confirmed_samples)


def _is_reduced(top: Operand, scores: Operand) -> bool:
    """Does it have the shape of a row maximum that kept its dimension?"""
    if len(top.shape) != len(scores.shape):
        return False
    sizes = zip(top.shape, scores.shape, strict=True)
    return any(small == 1 < size for small, size in sizes)


RULE = Rule(code="SG204", recognise=recognise, yields_to=("SG402",))

"""SG204: a softmax over a row in which everything is masked."""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import SOFTMAXES, words
from stepguard.diagnose.rule import Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, describe
from stepguard.records import Operand, Remedy

SOFTMAX_NODES = words("Softmax LogSoftmax Logsumexp SafeSoftmax Logcumsumexp")
PAIR_NODES = words("Logaddexp Logaddexp2")
MASKS = ("attn_bias", "attn_mask", "mask", "bias")


def _evidence(case: Case) -> Proof | None:
    if case.op in SOFTMAXES or case.node in SOFTMAX_NODES:
        return _softmax(case)
    return _pair(case) if case.node in PAIR_NODES else _row_maximum(case)


def _softmax(case: Case) -> Proof | None:
    scores = _masked(case)
    rows = case.evidence.masked_rows
    if scores is None and rows is None:
        return None
    if (
        scores is not None
        and rows is None
        and (scores.posinf or scores.neginf < min(scores.shape, default=1))
    ):
        return None
    return Proof(
        confidence=0.96,
        evidence=(_rows(case, rows, scores), _scores(scores), case.confirmed_samples),
    )


def _masked(case: Case) -> Operand | None:
    named = [o for o in case.inputs if o.name in MASKS and o.neginf]
    return next(iter(named + [o for o in case.inputs if o.neginf]), None)


def _rows(case: Case, rows: int | None, scores: Operand | None) -> str:
    how_many = f"{rows} row{'s' if rows != 1 else ''}" if rows else "a row"
    where = at_index(case.output) if case.output is not None else ""
    total = f" of {_total(case, scores)}" if scores is not None and rows else ""
    return (
        f"{case.place}: {how_many}{total} with every entry -inf{where}; exp(-inf) sums to 0 and "
        f"0 / 0 is NaN"
    )


def _total(case: Case, scores: Operand) -> str:
    return str(case.evidence.rows or math.prod(scores.shape[:-1]))


def _scores(scores: Operand | None) -> str:
    return describe(scores) if scores is not None else ""


def _pair(case: Case) -> Proof | None:
    """log(exp(a) + exp(b)) with both -inf is -inf, rightly; its slope is exp(-inf - -inf)."""
    both = [operand for operand in case.inputs if operand.neginf]
    if len(both) < 2 or not case.makes_nan:
        return None
    text = (
        f"{case.place}: both terms of a log-sum are -inf{at_index(both[0])}: its value is -inf, "
        f"its slope is 0 / 0"
    )
    return Proof(confidence=0.95, evidence=(text, *map(describe, both), case.confirmed_samples))


def _row_maximum(case: Case) -> Proof | None:
    """A hand-written softmax: the row's maximum, itself -inf, is subtracted from the row."""
    scores, top = case.argument("self", 0), case.argument("other", 1)
    if (
        case.op != "sub"
        or scores is None
        or top is None
        or not (scores.neginf and top.neginf and case.makes_nan)
    ):
        return None
    reduced = len(top.shape) == len(scores.shape) and any(
        small == 1 < size for small, size in zip(top.shape, scores.shape, strict=True)
    )
    if not reduced and case.evidence.masked_rows is None:
        return None
    text = (
        f"{case.place}: {top.neginf} row maxima are -inf, so every entry of those rows is "
        f"masked and -inf - -inf is NaN"
    )
    return Proof(confidence=0.94, evidence=(text, describe(scores), case.confirmed_samples))


RULE = Rule(
    code="SG204",
    title="softmax or logsumexp over a fully masked row",
    what=prose(
        """
        Every entry of a row is -inf when the softmax (log_softmax, logsumexp) normalises it: there is nothing
        to normalise, so the row becomes NaN, and its gradient poisons every weight.
        """
    ),
    why=prose(
        """
        A sample consists of padding only, a left-padded causal mask leaves the first queries without a key, a
        window or segment mask has no overlap, or two masks that are each harmless cover everything together.
        """
    ),
    how=prose(
        """
        The operation is a softmax (or a hand-written one that subtracts the row's maximum) and its operand
        has at least one whole row of -inf; the number of such rows is in the evidence. A causal mask with one
        free key per row is fine and not reported.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Give a dead row something to look at before the softmax, and zero it afterwards",
            snippet=code(
                """
                masked = score.masked_fill(pad, float('-inf'))
                dead = pad.all(dim=-1, keepdim=True)
                weights = torch.softmax(masked.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
                loss = (weights @ value).pow(2).mean()
                """
            ),
        ),
        Remedy(
            title="Use scaled_dot_product_attention: it returns 0 for fully masked rows, with "
            "finite gradients",
            snippet=code(
                """
                out = torch.nn.functional.scaled_dot_product_attention(
                    score[None], torch.eye(3)[None], value[None], attn_mask=~pad[None], scale=1.0
                )
                loss = out.pow(2).mean()
                """
            ),
            safety="changes-numbers",
        ),
        Remedy(
            title="Drop empty samples in the collate function",
            snippet=code(
                """
                keep = ~pad.all(dim=-1)
                weights = torch.softmax(score[keep].masked_fill(pad[keep], float('-inf')), dim=-1)
                loss = (weights @ value).pow(2).mean()
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        score = torch.randn(2, 3, requires_grad=True)
        value = torch.randn(3, 4)
        pad = torch.tensor([[False, False, True], [True, True, True]])  # the second row has no key left
        """
    ),
    bad=code(
        """
        weights = torch.softmax(score.masked_fill(pad, float('-inf')), dim=-1)
        loss = (weights @ value).pow(2).mean()
        """
    ),
    see=(
        "pytorch/pytorch#41508",
        "pytorch/pytorch#40932",
        "pytorch/pytorch#160064",
    ),
)

"""SG501: every gradient element is finite, their norm is not."""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.trends import lr_jump, rising

SQUARE_LIMIT = 1.8446744e19
"""The square root of the largest float32."""


def recognise(case: Case) -> Proof | None:
    if not case.reading.grads_finite or not _norm_infinite(case):
        return None
    limit = f"squares overflow from {SQUARE_LIMIT:.3g} on"
    if case.magnitude:
        limit += f"; the largest gradient element is {case.magnitude:.3g}"
    true_norm = case.evidence.finite_norm
    ran_away = rising(case) or lr_jump(case) is not None
    stored = case.evidence.huge_buffer or case.evidence.huge_parameter
    prove = certain
    if ran_away or stored:
        prove = likely
    return prove(
        "no gradient element is NaN or Inf, but their 2-norm in float32 is infinite",
        limit,
        f"in float64 the norm is {true_norm:.3g}" if true_norm is not None else "",
        _clipped_away(case),
    )


def _norm_infinite(case: Case) -> bool:
    if case.verdict.kind == "infinite_norm":
        return True
    norm = case.reading.grad_norm
    return norm is not None and math.isinf(norm) and case.loss_finite


def _clipped_away(case: Case) -> str:
    # clip_grad_norm_ multiplies by max_norm / norm without looking at the norm
    clip_norm = case.facts.clip_norm
    clip = "clip_grad_norm_"
    if clip_norm:
        clip = f"clip_grad_norm_ to {clip_norm:g}"
    return (
        f"{clip} would multiply every gradient by {clip_norm or 1:g} / inf = 0: a step that "
        f"learns nothing"
    )


RULE = Rule(code="SG501", recognise=recognise, yields_to=("SG601", "SG602"), shown_by="record")

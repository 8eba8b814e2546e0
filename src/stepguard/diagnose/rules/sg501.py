"""SG501: every gradient element is finite, their norm is not."""

from __future__ import annotations

import math

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import CERTAIN, LIKELY, Proof, Rule, code, prose
from stepguard.diagnose.trends import lr_jump, rising
from stepguard.records import Remedy

SQUARE_LIMIT = 1.8446744e19
"""The square root of the largest float32."""


def _evidence(case: Case) -> Proof | None:
    norm = case.reading.grad_norm
    infinite = norm is not None and math.isinf(norm) and case.loss_finite
    if not case.reading.grads_finite or not (infinite or case.verdict.kind == "infinite_norm"):
        return None
    first = "no gradient element is NaN or Inf, but their 2-norm in float32 is infinite"
    limit = f"squares overflow from {SQUARE_LIMIT:.3g} on"
    largest = f"; the largest gradient element is {case.magnitude:.3g}" if case.magnitude else ""
    true_norm = case.evidence.finite_norm
    wide = f"in float64 the norm is {true_norm:.3g}" if true_norm is not None else ""
    clip = (
        f"clip_grad_norm_ to {case.facts.clip_norm:g}"
        if case.facts.clip_norm
        else "clip_grad_norm_"
    )
    silent = (
        f"{clip} would multiply every gradient by {case.facts.clip_norm or 1:g} / inf = 0: a "
        f"step that learns nothing"
    )
    ran_away = rising(case) or lr_jump(case) is not None
    return Proof(
        confidence=LIKELY if ran_away else CERTAIN, evidence=(first, limit + largest, wide, silent)
    )


RULE = Rule(
    code="SG501",
    title="finite gradients, infinite norm",
    what=prose(
        """
        All gradient elements are finite, but the sum of their squares overflows float32, so the norm is Inf.
        Clipping divides by it and silently sets every gradient to 0.
        """
    ),
    why=prose(
        """
        The loss or its weights are huge (a sum instead of a mean, a wrong unit, an unscaled regularisation
        term), so gradients reach 1e19 and more. A check of the elements passes, a check of the norm stops the
        run or zeroes it.
        """
    ),
    how="The elements are tested exactly and the norm separately; the two disagree.",
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Clip by a norm that cannot overflow: divide by the largest element first",
            snippet=code(
                """
                (weight * x).sum().mul(1e20).backward()
                top = weight.grad.abs().max()
                norm = top * (weight.grad / top).norm()
                weight.grad.mul_((1.0 / norm).clamp_max(1.0))
                assert weight.grad.abs().max() > 0
                """
            ),
        ),
        Remedy(
            title="Find the term that is that large: use means instead of sums, and weights of "
            "order 1",
            snippet=code(
                """
                (weight * x).mean().backward()
                norm = torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
                assert weight.grad.abs().max() > 0
                """
            ),
            safety="changes-training",
        ),
    ),
    setup=code(
        """
        import torch

        weight = torch.nn.Parameter(torch.ones(100))
        x = torch.ones(100)
        """
    ),
    bad=code(
        """
        (weight * x).sum().mul(1e20).backward()
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)  # inf; every gradient is now 0
        """
    ),
    see=(
        "pytorch/pytorch#46849",
        "facebookresearch/fairseq#2384",
        "deepmodeling/deepmd-kit#5519",
    ),
)

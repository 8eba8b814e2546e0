"""SG202: the logarithm of zero or of a negative number."""

from __future__ import annotations

import math

from stepguard.diagnose.arithmetic import log_argument
from stepguard.diagnose.case import Case, has_zero, low
from stepguard.diagnose.ops import words
from stepguard.diagnose.rule import LIKELY, STRONG, Proof, Rule, code, prose
from stepguard.diagnose.wording import at_index, describe, spell
from stepguard.records import Remedy

LOG_NODES = words("Log Log1P Log2 Log10 Logit")
DETERMINANTS = words("_linalg_slogdet linalg_slogdet _linalg_det linalg_det")
SATURATING = words(
    "exp erf tanh sigmoid atan clamp clamp_max clamp_min reciprocal div softmax _softmax"
)


def _evidence(case: Case) -> Proof | None:
    if case.unselected:
        return None
    if case.phase == "backward":
        return _gradient(case)
    found = log_argument(case)
    if case.op in ("_linalg_slogdet", "linalg_slogdet", "logdet") and case.makes_inf:
        return Proof(
            confidence=STRONG,
            evidence=(f"{case.place} took the logarithm of a determinant that is 0",),
        )
    if case.op == "where" and (case.evidence.chosen_by or "").removeprefix("aten.") in DETERMINANTS:
        return Proof(
            confidence=STRONG,
            evidence=(f"{case.place}: the determinant is negative and has no logarithm",),
        )
    if found is None or not case.computes:
        return None
    operand, least, most = found
    swallowed = (case.evidence.absorbed_by or "").removeprefix("aten.").rstrip("_") in SATURATING
    allowed = (
        f"above {spell(least)}" if math.isinf(most) else f"between {spell(least)} and {spell(most)}"
    )
    numbers = f"{case.place} needs a value {allowed}: {describe(operand)}"
    wrong = (
        f"the value that broke it is {spell(operand.value)}{at_index(operand)}"
        if operand.index is not None
        else ""
    )
    confidence = LIKELY if swallowed else 0.92
    return Proof(confidence=confidence, evidence=(numbers, wrong, case.confirmed_samples))


def _gradient(case: Case) -> Proof | None:
    zero = next((o for o in case.inputs if has_zero(o) or low(o) < 0), None)
    if case.node not in LOG_NODES or zero is None:
        return None
    numbers = (
        f"{case.place} divides the gradient by the logarithm's argument, which is 0: "
        f"{describe(zero)}"
    )
    return Proof(confidence=0.86, evidence=(numbers, case.confirmed_samples))


RULE = Rule(
    code="SG202",
    title="log of a non-positive value",
    what=prose(
        """
        A logarithm (log, log1p, logit, xlogy, atanh ...) met an argument at or beyond its pole: log 0 is
        -inf, the log of a negative number is NaN.
        """
    ),
    why=prose(
        """
        A probability underflowed to exactly 0 (softmax of far-apart logits, a saturated sigmoid), a time or
        noise level hit 0, random numbers reached 0 in the Gumbel trick, or data that should be positive is
        not. The loss may even stay finite when the -inf is not selected: backward then multiplies 0 by
        infinity.
        """
    ),
    how=prose(
        """
        The operation is a logarithm and its operand holds a value outside the open interval where it is
        finite. If that value comes straight from the targets it is SG104; if an epsilon was added but rounded
        to 0, SG302.
        """
    ),
    evidence=_evidence,
    remedies=(
        Remedy(
            title="Stay in log space: log_softmax, logsigmoid, cross_entropy on logits never form "
            "the zero",
            snippet=code(
                """
                log_p = torch.nn.functional.log_softmax(logits, dim=-1)
                loss = -log_p.gather(1, label[:, None]).mean()
                """
            ),
        ),
        Remedy(
            title="Clamp the argument; 1e-8 beside 1 does nothing, a floor on the argument itself "
            "does",
            snippet=code(
                """
                p = torch.softmax(logits, dim=-1).clamp_min(torch.finfo(logits.dtype).tiny)
                loss = -p.log().gather(1, label[:, None]).mean()
                """
            ),
            safety="changes-numbers",
        ),
    ),
    setup=code(
        """
        import torch

        logits = torch.tensor([[120.0, 0.0, 0.0], [0.0, 120.0, 0.0]], requires_grad=True)
        label = torch.tensor([0, 1])
        """
    ),
    bad=code(
        """
        log_p = torch.softmax(logits, dim=-1).log()
        loss = -log_p.gather(1, label[:, None]).mean()
        """
    ),
    see=(
        "pytorch/pytorch#1620",
        "RasmussenLab/vamb#12",
        "summerlvsong/Aggregation-Cross-Entropy#2",
    ),
)
